"""`Patch`: a change to torch or Megatron with its reason, versions and a test of need; `replaced`: a temporary one.

The patches are the other files of this folder.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One change to an upstream library.

    Args:
        name: Name in the log.
        why: The fault that it fixes.
        megatron: The megatron-core versions that need it (PEP 440), as far as known.
        devices: Device types that need it.
        needed: Returns whether the fault exists; called before ``apply``, and by a test that shows when the patch
            can be removed.
        apply: Applies it.
    """

    name: str
    why: str
    megatron: str
    devices: frozenset[Device]
    needed: Callable[[], bool]
    apply: Callable[[], None]


CPU: frozenset[Device] = frozenset({"cpu"})
EVERYWHERE: frozenset[Device] = frozenset({"cpu", "cuda"})


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Replace an attribute in the block.

    Args:
        owner: Module, class or object; an attribute that it inherits is hidden, and found again after the block.
        name: Name of the attribute, which exists.
        value: Value in the block.
    """
    getattr(owner, name)
    is_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
