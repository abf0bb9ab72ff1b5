"""The linear layers of a block that stands in the place of attention."""

from mca_models.megatron.names import Implementation


def normed_linears(implementation: Implementation) -> tuple[type, type]:
    """The first, which is cut by columns and brings the norm before it if it can, and the last, cut by rows."""
    if implementation == "transformer_engine":
        from megatron.core.extensions.transformer_engine import (
            TELayerNormColumnParallelLinear,
            TERowParallelLinear,
        )

        return TELayerNormColumnParallelLinear, TERowParallelLinear
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    return ColumnParallelLinear, RowParallelLinear
