"""`Target` is what a model is to run on: this machine, or a GPU that is planned for on any machine."""

from dataclasses import dataclass

from mca_models.megatron import platform
from mca_models.megatron.names import Implementation


@dataclass(frozen=True, kw_only=True)
class Target:
    """What decides which settings a run can have.

    Args:
        device: ``cpu`` or ``cuda``.
        implementation: Whose layers.
        is_here: Whether it is this machine, of which more can be asked.
    """

    device: str
    implementation: Implementation
    is_here: bool

    @classmethod
    def here(cls, implementation: Implementation) -> "Target":
        """This machine."""
        return cls(device=platform.device_type(), implementation=implementation, is_here=True)

    @classmethod
    def planned(cls, implementation: Implementation) -> "Target":
        """A GPU that need not be here."""
        return cls(device="cuda", implementation=implementation, is_here=False)
