"""Accept mca's replicated down-projection in MLA.

``MLASelfAttention`` builds its down-projections only from a fixed list of classes. ``ReplicatedLinear`` replaces one
entry of that list, the quantisation tool's ``Linear``, which is never built here. The local spec shards the
down-projection by columns and gathers, whose backward never sums the gradient of the rotary key that all heads share
over tensor ranks.
"""

import inspect

from mca_models.megatron.layers.replicated import ReplicatedLinear
from mca_models.megatron.platform._patch import EVERYWHERE, Patch


def _needed() -> bool:
    import megatron.core.transformer.multi_latent_attention as mla

    lists_classes = "Unsupported linear_q_down_proj" in inspect.getsource(mla.MLASelfAttention.__init__)
    return lists_classes and mla.Linear is not ReplicatedLinear


def _apply() -> None:
    import megatron.core.transformer.multi_latent_attention as mla

    mla.Linear = ReplicatedLinear


PATCH = Patch(
    name="mla-down-projection",
    why="MLA builds its down-projections only from listed classes, and the local one has wrong gradients",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
