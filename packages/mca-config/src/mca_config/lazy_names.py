"""Lazy imports of the names that a package exports. Type checkers read the package's ``TYPE_CHECKING`` imports."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def make_lazy_getattr(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of ``package``.

    Args:
        package: Name of the package.
        homes: Submodule of each exported name.
    """

    def attribute(name: str) -> Any:
        if name in homes:
            return getattr(import_module(f"{package}.{homes[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return attribute
