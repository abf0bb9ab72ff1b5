"""Packages with the names that other programs import: ``mcore_adapter`` for LLaMA-Factory and, as ``roll``, for ROLL.

They are outside ``sys.path`` until ``PYTHONPATH`` has what ``mca-train client`` prints.
"""

from pathlib import Path

from mca_config.errors import UsageError
from mca_config.printable import suggestion

_FOLDER = Path(__file__).parent


def client_path(name: str) -> Path:
    """Return the directory that makes the package ``name`` importable when it is on ``sys.path``.

    Raises:
        UsageError: There is no such package.
    """
    names = sorted(path.name for path in _FOLDER.iterdir() if any(path.glob("*/__init__.py")))
    if name not in names:
        known = f"it is one of {', '.join(names)}"
        raise UsageError(f"unknown client '{name}'{suggestion(name, names, known)}")
    return _FOLDER / name
