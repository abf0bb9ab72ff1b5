"""Replace ``torch.compile`` by the identity while Megatron is imported.

Megatron decorates some twenty small helpers with ``torch.compile`` at import. That imports inductor (4 s per process)
and, when such a helper runs, needs a C++ compiler. A GPU benefits from it; a CPU test does not. ``torch.compile`` is
restored after the import.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from mca_models.megatron.types import Upstream


def identity(model: Upstream = None, *args: object, **kwargs: object) -> Upstream:
    """Return ``model``, or as a decorator with arguments, a decorator that changes nothing."""

    def unchanged(function: Callable[..., Upstream]) -> Callable[..., Upstream]:
        return function

    return unchanged if model is None else model


@contextmanager
def without_compile() -> Iterator[None]:
    """Replace ``torch.compile`` in this block."""
    original = torch.compile
    torch.compile = identity
    try:
        yield
    finally:
        torch.compile = original
