"""``torch.compile`` is the identity while Megatron is imported.

Megatron decorates some twenty small helpers with ``torch.compile`` at import. That imports inductor
(4 s for each process) and, when such a helper runs, wants a C++ compiler. A GPU gains from it; a CPU test
does not. The true ``torch.compile`` is back once the import is over.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def identity(model: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``model`` itself, or as a decorator with arguments, one that changes nothing."""

    def unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
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
