"""CPU as a platform of verl, which knows only accelerators."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType

import torch
import torch.distributed
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_base import PlatformBase

from mca_train.types import Upstream

_BACKENDS = "cpu:gloo,cpu:gloo"
"""verl's backends of host and device, which torch does not accept if both are the CPU."""


class CpuModule(ModuleType):
    """``torch.cpu`` with the functions of ``torch.cuda`` that verl calls; memory counts as unused."""

    def __getattr__(self, name: str) -> Upstream:
        return getattr(torch.cpu, name)

    def empty_cache(self) -> None:
        """Do nothing: there is no cache."""

    def memory_allocated(self, *_: object) -> int:
        """Return 0."""
        return 0

    max_memory_allocated = max_memory_reserved = memory_reserved = memory_allocated

    def mem_get_info(self, *_: object) -> tuple[int, int]:
        """Return no free and no total memory."""
        return 0, 0

    def reset_peak_memory_stats(self, *_: object) -> None:
        """Do nothing: there is no peak."""

    def ipc_collect(self) -> None:
        """Do nothing: nothing is shared."""

    def set_device(self, *_: object) -> None:
        """Do nothing: there is one device."""

    def get_device_name(self, *_: object) -> str:
        """Return the device's name."""
        return "cpu"


class CpuPlatform(PlatformBase):  # type: ignore[misc]
    """One CPU device for each rank, with gloo between ranks."""

    device_name = vendor_name = "cpu"
    device_module = CpuModule("torch.cpu")

    def is_available(self) -> bool:
        """Return True."""
        return True

    def current_device(self) -> str:
        """Return the device, which ``Tensor.to`` takes as it takes a GPU's index."""
        return "cpu"

    def device_count(self) -> int:
        """Return 1."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Do nothing: there is one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: a CPU computes synchronously."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch's generator."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing: the allocator has no settings."""

    def empty_cache(self) -> None:
        """Do nothing: there is no cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """Return no compute capability."""
        return None, None

    def communication_backend_name(self) -> str:
        """Return the backend of collectives."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Return a variable that nothing sets."""
        return "VERL_CPU_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Run the block without a profiler."""
        yield

    def profiler_start(self) -> None:
        """Do nothing: there is no profiler."""

    def profiler_stop(self) -> None:
        """Do nothing: there is no profiler."""

    def ray_resource_name(self) -> str:
        """Return Ray's name of the resource."""
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        """Return no variables."""
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Upstream]:
        """Return Ray's options of a worker with a share of a CPU."""
        return {"num_cpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        """Return False: tensors are not shared between processes."""
        return False

    def cudart(self) -> None:
        """Return no CUDA runtime."""


def use_cpu() -> None:
    """Make verl run on the CPU; call this before verl starts process groups."""
    set_platform(CpuPlatform())
    torch.distributed.init_process_group = _with_one_backend(torch.distributed.init_process_group)


def _with_one_backend(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def init_process_group(backend: str | None = None, *args: Upstream, **options: Upstream) -> None:
        init("gloo" if backend == _BACKENDS else backend, *args, **options)

    return init_process_group
