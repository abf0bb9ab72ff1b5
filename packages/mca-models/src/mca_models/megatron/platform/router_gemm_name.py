"""Define ``te_general_gemm`` if Transformer Engine is missing.

megatron-core 0.16.1 imports the name inside a ``try`` and then reads it unconditionally in the router's gating linear,
which raises NameError without Transformer Engine. Later versions set it to None in the ``except``.
"""

from mca_models.megatron.platform._patch import EVERYWHERE, Patch


def _needed() -> bool:
    import megatron.core.transformer.moe.moe_utils as moe_utils

    return not hasattr(moe_utils, "te_general_gemm")


def _apply() -> None:
    import megatron.core.transformer.moe.moe_utils as moe_utils

    moe_utils.te_general_gemm = None


PATCH = Patch(
    name="router-gemm-name",
    why="the MoE router raises NameError: te_general_gemm without Transformer Engine",
    megatron="<0.17",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
