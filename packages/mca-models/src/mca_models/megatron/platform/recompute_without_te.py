"""Recompute modules whose output is discarded without Transformer Engine.

``CheckpointWithoutOutput(fp8=False)`` treats False as fp8 (it tests ``is not None``) and then uses names of Transformer
Engine: ``recompute_modules`` with layernorm raises ``NameError: FP8GlobalStateManager``.
"""

import functools

from mca_models.megatron.platform._patch import EVERYWHERE, Patch
from mca_models.megatron.types import Upstream


def _needed() -> bool:
    from megatron.core.tensor_parallel import random

    return not hasattr(random, "FP8GlobalStateManager") and random.CheckpointWithoutOutput().fp8


def _apply() -> None:
    from megatron.core.tensor_parallel import random

    made = random.CheckpointWithoutOutput.__init__

    @functools.wraps(made)
    def with_or_without(self: Upstream, fp8: Upstream = None, *args: object, **options: object) -> None:
        made(self, fp8 or None, *args, **options)

    random.CheckpointWithoutOutput.__init__ = with_or_without


PATCH = Patch(
    name="recompute-without-te",
    why="recomputing a norm raises NameError without Transformer Engine",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
