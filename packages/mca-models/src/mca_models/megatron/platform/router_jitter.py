"""Multiply the routers' input by noise in training only.

``apply_input_jitter`` (``moe_input_jitter_eps``) does not check for training mode. Evaluation losses and
log-probabilities of reference models would be random, and would advance the generator of training.
"""

import functools
import inspect

from torch import Tensor

from mca_models.megatron.platform._patch import EVERYWHERE, Patch
from mca_models.megatron.types import Upstream


def _needed() -> bool:
    from megatron.core.transformer.moe.router import TopKRouter

    plain = TopKRouter.apply_input_jitter
    return "training" not in inspect.getsource(plain) and not hasattr(plain, "__wrapped__")


def _apply() -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    plain = TopKRouter.apply_input_jitter

    @functools.wraps(plain)
    def in_training(self: Upstream, input: Tensor) -> Tensor:
        result: Tensor = plain(self, input) if self.training else input
        return result

    TopKRouter.apply_input_jitter = in_training


PATCH = Patch(
    name="router-jitter",
    why="routers multiply their input by noise in evaluation too",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
