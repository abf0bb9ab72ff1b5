"""One loss scale for all optimizers of a chain.

In fp16 Megatron gives the optimizer of experts a scale beside that of the rest (megatron-core 0.16.1 and 0.19.2).
Losses are multiplied by the first one's, and each divides its own gradients by its own: once a gradient overflows in
one of them alone, those of the other are wrong by the quotient of the two, and stay so.
"""

from functools import partial

from mca_train.types import MegatronOptimizer


def share_loss_scale(optimizer: MegatronOptimizer) -> None:
    """Makes the optimizers of a chain have the scale of the first, which moves once a step, by what all found."""
    singles = getattr(optimizer, "chained_optimizers", [])
    if (
        len(singles) < 2 or getattr(singles[0], "grad_scaler", None) is None
    ):  # whole ones in fp32 have no attribute
        return
    for single in singles[1:]:
        single.grad_scaler = singles[0].grad_scaler
    optimizer.prepare_grads = partial(_prepare_grads, optimizer)


def _prepare_grads(optimizer: MegatronOptimizer) -> bool:
    """Divides all gradients by the scale; whether one of them is no number."""
    scaler = optimizer.chained_optimizers[0].grad_scaler
    scaler.update = lambda found: None
    try:
        found = [bool(single.prepare_grads()) for single in optimizer.chained_optimizers]
    finally:
        del scaler.update
    scaler.update(any(found))
    return any(found)
