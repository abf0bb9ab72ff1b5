"""``torch.compile`` is the identity while Megatron is imported.

Megatron decorates some twenty small helpers with ``torch.compile`` at import. That imports inductor
(4 s for each process) and, when such a helper runs, wants a C++ compiler. A GPU gains from it; a CPU test
does not. The true ``torch.compile`` is back once the import is over.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from mca_models.megatron.types import Upstream


def identity(model: Upstream = None, *args: object, **kwargs: object) -> Upstream:
    """``model`` itself, or as a decorator with arguments, one that changes nothing."""

    def unchanged(function: Callable[..., Upstream]) -> Callable[..., Upstream]:
        return function

    return unchanged if model is None else model


@contextmanager
def without_compile() -> Iterator[None]:
    """Replaces ``torch.compile`` for the time of the block."""
    true = torch.compile
    torch.compile = identity
    try:
        yield
    finally:
        torch.compile = true
