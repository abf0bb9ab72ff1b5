"""The linear layers of a block that stands in the place of attention."""

from mca_models.megatron.names import Implementation


def normed_linears(implementation: Implementation, *, norm: bool = True) -> tuple[type, type]:
    """The first, which is cut by columns, and the last, cut by rows.

    Args:
        implementation: Whose they are.
        norm: The first brings the norm before it if it can.
    """
    if implementation == "transformer_engine":
        from megatron.core.extensions.transformer_engine import (
            TEColumnParallelLinear,
            TELayerNormColumnParallelLinear,
            TERowParallelLinear,
        )

        return TELayerNormColumnParallelLinear if norm else TEColumnParallelLinear, TERowParallelLinear
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    return ColumnParallelLinear, RowParallelLinear
