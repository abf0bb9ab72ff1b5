"""One loss scale for all optimizers of a chain.

In fp16 Megatron gives the experts' optimizer a loss scale separate from that of the dense parameters (megatron-core
0.16.1 and 0.19.2). Losses are multiplied by the first scale, and each optimizer divides its gradients by its own. After
an overflow in one optimizer alone, the gradients of the other are wrong by the quotient of the two scales.
"""

from functools import partial

from mca_train.types import MegatronOptimizer


def share_loss_scale(optimizer: MegatronOptimizer) -> None:
    """Give all optimizers of a chain the first one's loss scale, updated once a step from all overflow checks."""
    singles = getattr(optimizer, "chained_optimizers", [])
    if (
        len(singles) < 2 or getattr(singles[0], "grad_scaler", None) is None
    ):  # a non-distributed fp32 optimizer has no scaler
        return
    for single in singles[1:]:
        single.grad_scaler = singles[0].grad_scaler
    optimizer.prepare_grads = partial(_prepare_grads, optimizer)


def _prepare_grads(optimizer: MegatronOptimizer) -> bool:
    """Divide all gradients by the scale; return True if one is not finite."""
    scaler = optimizer.chained_optimizers[0].grad_scaler
    scaler.update = lambda overflowed: None
    try:
        overflowed = [bool(single.prepare_grads()) for single in optimizer.chained_optimizers]
    finally:
        del scaler.update
    scaler.update(any(overflowed))
    return any(overflowed)
