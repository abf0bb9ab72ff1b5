"""Linear layers of a block that replaces attention."""

from mca_models.megatron.names import Implementation


def normed_linears(implementation: Implementation, *, norm: bool = True) -> tuple[type, type]:
    """Return the classes of the first linear, column-parallel, and of the last, row-parallel.

    Args:
        implementation: Layer implementation.
        norm: Fuse the norm into the first linear if the implementation can.
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
