"""Patches that let Megatron run without CUDA."""

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from functools import wraps

import torch
from torch.jit._builtins import _find_builtin, _register_builtin
from torch.utils._device import DeviceContext, _device_constructors

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


def _apply_cuda_calls() -> None:
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


CUDA_CALLS = Patch(
    name="cuda-calls",
    why="megatron-core calls torch.cuda.current_device() and friends unconditionally; they raise without CUDA",
    megatron=">=0.16.1",
    devices=CPU,
    needed=lambda: True,
    apply=_apply_cuda_calls,
)
"""Replace ``torch.cuda.*`` calls that Megatron makes unconditionally: current device, streams, events, RNG.

If MCA_DEVICE is ``cpu``, an existing GPU is hidden.

Every name gets a separate function object: ``torch._dynamo`` builds a table keyed by function and fails on duplicates.
``manual_seed_all`` is not replaced, because ``torch.manual_seed`` calls it.
"""


_CPU_DEVICE = torch.device("cpu")
_TO: Upstream = torch.Tensor.to
_TYPE: Upstream = torch.Tensor.type


def _on_cpu(value: Upstream) -> Upstream:
    if isinstance(value, torch.device):
        return _CPU_DEVICE if value.type == "cuda" else value
    return _CPU_DEVICE if isinstance(value, str) and value.startswith("cuda") else value


def _cpu_arguments(kwargs: dict[str, Upstream]) -> dict[str, Upstream]:
    """Replace CUDA devices and pinned memory in ``kwargs``."""
    if "device" in kwargs:
        kwargs["device"] = _on_cpu(kwargs["device"])
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    return kwargs


def _creating_on_cpu(create: Callable[..., Upstream]) -> Callable[..., Upstream]:
    """Wrap a function or method that creates a tensor."""

    @wraps(create)
    def call(*args: Upstream, **kwargs: Upstream) -> Upstream:
        return create(*args, **_cpu_arguments(kwargs)) if kwargs else create(*args)

    return call


def _to(self: torch.Tensor, *args: Upstream, **kwargs: Upstream) -> Upstream:
    return _TO(self, *map(_on_cpu, args), **_cpu_arguments(kwargs))


def _type(self: torch.Tensor, *args: Upstream, **kwargs: Upstream) -> Upstream:
    result = _TYPE(self, *args, **kwargs)
    if args or kwargs or result.startswith("torch.cuda."):  # a function mode calls this function again
        return result
    return result.replace("torch.", "torch.cuda.", 1)


_NEW = ("new", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
"""Methods of tensors that take a device."""
_BY_NAME = {
    torch: ("normal",),
    torch.fft: ("fftfreq", "rfftfreq"),
    torch.nested: ("nested_tensor", "as_nested_tensor"),
}
"""Functions that take a device, in addition to the constructors in ``torch`` and its ``*_like``."""


def _replace(owner: Upstream, name: str, call: Callable[..., Upstream]) -> None:
    """Set ``owner.name`` to ``call``, which is pickled by that name."""
    if isinstance(owner, type):
        call.__module__, call.__qualname__ = owner.__module__, f"{owner.__qualname__}.{name}"
    else:
        call.__module__, call.__qualname__ = owner.__name__, name
    setattr(owner, name, call)


def _replace_function(module: Upstream, name: str) -> None:
    function = getattr(module, name)
    _replace(module, name, created := _creating_on_cpu(function))
    if operator := _find_builtin(function):
        _register_builtin(created, operator)  # for torch.jit.script


def _apply_cuda_tensors() -> None:
    tensor: Upstream = torch.Tensor
    tensor.cuda = lambda self, *a, **k: self
    tensor.pin_memory = lambda self, *a, **k: self
    _replace(tensor, "to", _to)
    _replace(tensor, "type", _type)
    for name in _NEW:
        _replace(tensor, name, _creating_on_cpu(getattr(tensor, name)))
    # cached before they are replaced: `with torch.device(...)` recognises the functions that are called in the end
    constructors = _device_constructors()
    for name, function in list(vars(torch).items()):
        if callable(function) and (function in constructors or name.endswith("_like")):
            _replace_function(torch, name)
    for module, names in _BY_NAME.items():
        for name in names:
            _replace_function(module, name)
    _apply_device_context()


def _apply_device_context() -> None:
    context: Upstream = DeviceContext  # `with torch.device("cuda")`, torch.set_default_device("cuda")
    init = context.__init__

    @wraps(init)
    def init_on_cpu(self: DeviceContext, device: Upstream) -> None:
        init(self, _on_cpu(torch.device(device)))

    context.__init__ = init_on_cpu


CUDA_TENSORS = Patch(
    name="cuda-tensors",
    why="megatron-core creates tensors on the device 'cuda' by name",
    megatron=">=0.16.1",
    devices=CPU,
    needed=lambda: True,
    apply=_apply_cuda_tensors,
)
"""Create tensors for the device "cuda" on the CPU; pinned memory is ordinary memory.

Megatron writes ``device="cuda"``, ``.cuda()`` and ``pin_memory=True`` literally, and its distributed optimizer sorts
parameters by ``Tensor.type()`` into "torch.cuda.FloatTensor" and so on. The functions that create tensors are
wrapped: a ``TorchFunctionMode`` would cost 1 to 3 microseconds in every call of torch and every read of an attribute.
"""


_ENGINE = "transformer_engine"


def _engine_on_cpu_needed() -> bool:
    return importlib.util.find_spec(_ENGINE) is not None


def _apply_engine_on_cpu() -> None:
    modules: Upstream = sys.modules
    for name in [_ENGINE, *(name for name in modules if name.startswith(f"{_ENGINE}."))]:
        modules[name] = None  # Python treats None as a missing module


ENGINE_ON_CPU = Patch(
    name="engine-on-cpu",
    why="Megatron takes Transformer Engine's optimizer and kernels where it is installed; they need a GPU",
    megatron=">=0.16.1",
    devices=CPU,
    needed=_engine_on_cpu_needed,
    apply=_apply_engine_on_cpu,
)
"""Hide Transformer Engine from a process that computes on the CPU.

If it is installed, Megatron uses its optimizer and its kernels for gradient norms with all layer implementations, and
they run on a GPU only. PEFT, which looks for its layers, may have imported it before, and keeps its references.
"""


def _apply_rng_state() -> None:
    import megatron.core.tensor_parallel.random as random

    def get_state(device: Upstream = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, device: Upstream = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


RNG_STATE = Patch(
    name="rng-state",
    why="megatron-core reads and writes the CUDA generator for dropout and initialisation",
    megatron=">=0.16.1",
    devices=CPU,
    needed=lambda: True,
    apply=_apply_rng_state,
)
"""Use torch's CPU random state for Megatron's "CUDA" random state.

There is only one generator then, so Megatron's check that the CPU state did not change inside a fork of the tracker
always warns; its logger is set to errors only.
"""


def identity(model: Upstream = None, *args: object, **kwargs: object) -> Upstream:
    """Return ``model``, or as a decorator with arguments, a decorator that changes nothing."""

    def unchanged(function: Callable[..., Upstream]) -> Callable[..., Upstream]:
        return function

    return unchanged if model is None else model


@contextlib.contextmanager
def without_compile() -> Iterator[None]:
    """Replace ``torch.compile`` by the identity in this block, in which Megatron is imported.

    Megatron decorates some twenty small helpers with it at import. That imports inductor (4 s per process) and, when
    such a helper runs, needs a C++ compiler. A GPU benefits from it; a CPU test does not.
    """
    original = torch.compile
    torch.compile = identity
    try:
        yield
    finally:
        torch.compile = original
