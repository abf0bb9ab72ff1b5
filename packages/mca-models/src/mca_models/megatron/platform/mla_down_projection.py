"""Multi-latent attention accepts our replicated down-projection.

``MLASelfAttention`` builds its down-projections only from a fixed list of classes. One entry of that list, the
quantisation tool's ``Linear``, is never built here and makes room for ``DuplicatedLinear``, without which
the local spec computes wrong gradients on several tensor ranks.
"""

import inspect

from mca_models.megatron.layers.latent import DuplicatedLinear
from mca_models.megatron.platform._patch import EVERYWHERE, Patch


def _needed() -> bool:
    import megatron.core.transformer.multi_latent_attention as mla

    lists_classes = "Unsupported linear_q_down_proj" in inspect.getsource(mla.MLASelfAttention.__init__)
    return lists_classes and mla.Linear is not DuplicatedLinear


def _apply() -> None:
    import megatron.core.transformer.multi_latent_attention as mla

    mla.Linear = DuplicatedLinear


PATCH = Patch(
    name="mla-down-projection",
    why="MLA builds its down-projections only from listed classes, and the local one has wrong gradients",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
