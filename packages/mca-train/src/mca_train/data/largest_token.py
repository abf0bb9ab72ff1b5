"""The largest token of an indexed dataset is looked for once, which reads the whole file, and then kept beside it.

<prefix>.largest.json                   in the folder of the dataset, or in tokenized_cache if that is set
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mca_config.files import atomic_write

logger = logging.getLogger(__name__)

_PIECE = 1 << 22  # tokens that are looked at together
_LONG = 1 << 30  # bytes that take a while to read


def largest_token(
    file: Path, tokens: "np.memmap[tuple[int], np.dtype[np.int32]]", cache: str | None = None
) -> int:
    """The largest of ``tokens``; 0 if there are none. Of the processes of a machine one looks, the others wait.

    What was found before holds while the file has the same size and times.

    Args:
        file: What ``tokens`` are mapped from.
        tokens: All of them.
        cache: The folder to keep it in; None: that of ``file``.
    """
    kept = _place(file, cache)
    state = _state(file, tokens)
    if (found := _read(kept, state)) is not None:
        return found
    if not os.access(kept.parent, os.W_OK):
        return _looked_for(
            file, tokens, "at each start, as its folder cannot be written; set tokenized_cache"
        )
    with _alone(file):
        if (found := _read(kept, state)) is not None:
            return found
        found = _looked_for(file, tokens, f"once; it is kept in {kept}")
        if state == _state(file, tokens):
            with contextlib.suppress(OSError), atomic_write(kept) as partial:
                partial.write_text(json.dumps({**state, "largest": found}))
    return found


def _place(file: Path, cache: str | None) -> Path:
    if cache is None:
        return file.with_suffix(".largest.json")
    folder = Path(cache)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:32]}.largest.json"


def _state(file: Path, tokens: "np.memmap[tuple[int], np.dtype[np.int32]]") -> dict[str, object]:
    """What is another as soon as the file, or how it is read, is."""
    told = file.stat()
    return {
        "size": told.st_size,
        "modified": told.st_mtime_ns,
        "changed": told.st_ctime_ns,
        "dtype": str(tokens.dtype),
    }


def _read(kept: Path, state: dict[str, object]) -> int | None:
    try:
        said = json.loads(kept.read_text())
        return int(said["largest"]) if {name: said[name] for name in state} == state else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _looked_for(file: Path, tokens: "np.memmap[tuple[int], np.dtype[np.int32]]", how_often: str) -> int:
    if tokens.nbytes >= _LONG:
        logger.info(
            "%s: all %.1f GiB are read for the largest token, %s", file, tokens.nbytes / (1 << 30), how_often
        )
    pieces = (tokens[start : start + _PIECE] for start in range(0, len(tokens), _PIECE))
    return max((int(piece.max()) for piece in pieces), default=0)


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[None]:
    """A block that one process is in at a time, where the file system has locks."""
    with file.open("rb") as stream:
        with contextlib.suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
