"""`replaced`: an attribute of torch or Megatron that another function takes the place of during a dry run."""

from collections.abc import Iterator
from contextlib import contextmanager


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
