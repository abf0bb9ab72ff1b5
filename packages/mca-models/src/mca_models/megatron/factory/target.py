"""`Target`: the device and implementation that a model runs on."""

from dataclasses import dataclass

from mca_models.megatron import platform
from mca_models.megatron.names import Implementation


@dataclass(frozen=True, kw_only=True)
class Target:
    """Device and implementation: this machine, or a GPU that a plan is for.

    Args:
        device: ``cpu`` or ``cuda``.
        implementation: Layer implementation.
        is_here: Whether it is this machine, whose kernels can be checked.
    """

    device: str
    implementation: Implementation
    is_here: bool

    @classmethod
    def here(cls, implementation: Implementation) -> "Target":
        """Return this machine."""
        return cls(device=platform.device_type(), implementation=implementation, is_here=True)

    @classmethod
    def planned(cls, implementation: Implementation) -> "Target":
        """Return a GPU that need not be in this machine."""
        return cls(device="cuda", implementation=implementation, is_here=False)
