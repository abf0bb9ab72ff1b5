"""Replace ``torch.cuda.*`` calls that Megatron makes unconditionally: current device, streams, events, RNG.

If MCA_DEVICE is ``cpu``, an existing GPU is hidden.

Every name gets a separate function object: ``torch._dynamo`` builds a table keyed by function and fails on duplicates.
``manual_seed_all`` is not replaced, because ``torch.manual_seed`` calls it.
"""

import contextlib
from collections.abc import Callable

import torch

from mca_models.megatron.platform._patch import CPU, Patch
from mca_models.megatron.types import Upstream

CPU_DEVICE = torch.device("cpu")


class IdleStream:
    """Replacement for a CUDA stream: every method does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def __enter__(self) -> "IdleStream":
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def record_event(self, *args: object) -> "IdleEvent":
        """Return an event that has already happened."""
        return IdleEvent()


class IdleEvent:
    """Replacement for a CUDA event that has already happened."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def query(self) -> bool:
        """Return True: the event has happened."""
        return True

    def elapsed_time(self, other: "IdleEvent") -> float:
        """Return 0: no time passes between idle events."""
        return 0.0


def _apply() -> None:
    cuda: Upstream = torch.cuda
    cuda.is_available = lambda: False  # on the CPU of a machine that has a GPU too
    cuda.device_count = lambda: 0
    cuda.current_device = lambda: CPU_DEVICE
    cuda.set_device = lambda *a, **k: None
    cuda.synchronize = lambda *a, **k: None
    cuda.empty_cache = lambda: None
    cuda.Stream, cuda.Event = IdleStream, IdleEvent
    cuda.current_stream = lambda *a, **k: IdleStream()
    cuda.default_stream = lambda *a, **k: IdleStream()
    cuda.stream = lambda s: contextlib.nullcontext()
    cuda.set_stream = lambda s: None
    cuda.get_device_capability = lambda *a: (0, 0)
    cuda.get_rng_state = lambda *a, **k: torch.get_rng_state()
    cuda.set_rng_state = lambda s, *a, **k: torch.set_rng_state(s)
    cuda.manual_seed = lambda s: torch.default_generator.manual_seed(s)
    cuda.nvtx.range_push = lambda *a, **k: None
    cuda.nvtx.range_pop = lambda *a, **k: None


PATCH = Patch(
    name="cuda-calls",
    why="megatron-core calls torch.cuda.current_device() and friends unconditionally; they raise without CUDA",
    megatron=">=0.16.1",
    devices=CPU,
    needed=lambda: True,
    apply=_apply,
)
