"""Environment variables that Megatron writes and by which Transformer Engine chooses an attention kernel."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from mca_config.errors import McaError

DETERMINISM = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
"""Read by Transformer Engine's attention when it is built: whether gradients may differ from run to run."""
NAMES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


@contextmanager
def kernel_choice(backend: str | None, *, engine: bool, deterministic: bool = False) -> Iterator[None]:
    """Set the variables while Megatron builds a model.

    Args:
        backend: The model's ``attention_backend``.
        engine: Whether the model has Transformer Engine's attention, which reads the variables in every forward pass:
            then they stay set. Else they are restored, so that the next model may choose another kernel.
        deterministic: The model's ``deterministic_mode``, which the engine's attention reads in the environment too.

    Raises:
        McaError: The variables contradict ``backend``, set by the user or for another model of this process.
    """
    before = {} if engine else {name: os.environ.pop(name) for name in NAMES if name in os.environ}
    allowed = os.environ.get(DETERMINISM)
    if deterministic:
        os.environ[DETERMINISM] = "0"
    try:
        yield
    except AssertionError as error:
        name = next((name for name in NAMES if str(error).startswith(name)), None)
        if name is None:
            raise
        raise McaError(
            f"{name} is {os.environ[name]} in the environment, which contradicts attention_backend "
            f"{backend or 'auto'}; unset {', '.join(NAMES)}, or set attention_backend to the same choice (a process "
            "can have only one)"
        ) from error
    finally:
        if deterministic:
            os.environ.pop(DETERMINISM)
            os.environ.update({} if allowed is None else {DETERMINISM: allowed})
        if not engine:
            for name in NAMES:
                os.environ.pop(name, None)
            os.environ.update(before)
