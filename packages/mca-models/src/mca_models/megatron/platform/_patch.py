"""What a patch of torch or Megatron is: a reason, the versions it serves, a test of need, a deed.

The patches themselves are the files beside this one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One change to an upstream library.

    Args:
        name: What the log calls it.
        why: What goes wrong without it.
        megatron: The megatron-core versions that need it (PEP 440), as far as they are known.
        devices: Where it is applied.
        needed: Whether the fault is there; checked before ``apply``, and by a test that shows when the
            patch can go.
        apply: Does it.
    """

    name: str
    why: str
    megatron: str
    devices: frozenset[Device]
    needed: Callable[[], bool]
    apply: Callable[[], None]


CPU: frozenset[Device] = frozenset({"cpu"})
EVERYWHERE: frozenset[Device] = frozenset({"cpu", "cuda"})
