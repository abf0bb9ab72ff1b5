"""Safe reading of untrusted files: no blocking on pipes, no unbounded sizes, no paths outside their directory."""

import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mca_config.errors import DiskFull, McaError
from mca_config.printable import counted
from mca_config.types import JsonObject, Typed

MAX_TEXT_BYTES = 256 << 20
"""Largest text that is parsed; the index of a model with a million tensors has half of it."""
COPY_AGAIN = "copy or download it again"
"""Remedy in the messages about damaged files."""
_DEEPEST = 64  # nesting levels of JSON; a configuration has five


def resolve_inside(directory: Path, name: str) -> Path:
    """Return the path of file ``name`` in ``directory``; neither its name nor a link may lead elsewhere.

    A snapshot of the Hugging Face cache links to the ``blobs`` next to its ``snapshots``, and these may link to the
    ``blobs`` that all models of a cache share: both are allowed. The directory itself may be a link.

    Raises:
        McaError: The path is outside the directory.
    """
    file = directory / name
    try:
        resolved, root = file.resolve(), directory.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name with a NUL
        raise McaError(f"{directory}: {name!r:.200} cannot be a file of it ({error})") from None
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parents[1] / "blobs")
        shared = root.parents[2] / "blobs"
        if (shared / ".huggingface-shared-blobs").is_file():
            allowed.append(shared)
    if not any(resolved.is_relative_to(folder) for folder in allowed):
        raise McaError(f"{file}: leads out of the directory, to {resolved}; put the file itself there")
    return file


def has_entry(directory: Path, name: str) -> bool:
    """Return whether ``directory`` has an entry ``name``, also one that cannot be read: a pipe, a broken link.

    Raises:
        McaError: The directory cannot be read.
    """
    with naming_read_errors(directory / name):
        try:
            (directory / name).lstat()
        except (FileNotFoundError, NotADirectoryError, ValueError):  # a name with a NUL
            return False
        return True


def write_error(file: object, error: OSError, needed: int | None = None, *, advice: str = "") -> McaError:
    """Return the `McaError` for a failed write of ``file``.

    Args:
        file: Its path.
        error: The failure.
        needed: Bytes that it needs, if known.
        advice: The fix, unless the disk is full.
    """
    message = f"{file}: cannot be written ({error.strerror})"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return McaError(f"{message}; {advice}" if advice else message)
    full = DiskFull(message)
    if needed is not None and error.errno == errno.ENOSPC:
        with suppress(OSError):
            free = shutil.disk_usage(Path(str(file)).parent).free
            full.room = (
                f"{Path(str(file)).name} needs {counted(needed, 'byte')}, {counted(free, 'byte')} are free"
            )
    return full


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """Yield a temporary path next to ``file``, which replaces ``file`` after the block and is removed on failure."""
    temporary = file.with_name(f".{file.name}")
    try:
        yield temporary
        temporary.replace(file)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def exclusive_lock(file: Path, mode: str = "a") -> Iterator[None]:
    """Context of an exclusive lock of ``file``, opened in ``mode``, where the file system supports locks."""
    with file.open(mode) as stream:
        with suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextmanager
def naming_read_errors(file: Path) -> Iterator[None]:
    """Convert an ``OSError`` of the block to an `McaError` that names ``file``, or the file in that directory.

    Raises:
        McaError: The file cannot be read.
    """
    try:
        yield
    except OSError as error:
        inner = isinstance(error.filename, str) and Path(error.filename).is_relative_to(file)
        raise McaError(
            f"{error.filename if inner else file}: cannot be read ({error.strerror or error})"
        ) from None


def open_regular(file: Path) -> int:
    """Open ``file`` for reading and return its descriptor; never block on a pipe or a device.

    Raises:
        OSError: The file cannot be opened.
        McaError: It is a directory, pipe, socket or device.
    """
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise McaError(f"{file}: not a file but a socket, or a device that is not there") from None
        raise
    try:
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
    except OSError:
        os.close(fd)
        raise
    if regular:
        return fd
    os.close(fd)
    raise McaError(f"{file}: not a file but a directory, pipe or device")


def read_bytes(file: Path, absent: str = "expected a file", largest: int = MAX_TEXT_BYTES) -> bytes:
    """Return the contents of ``file``.

    Args:
        file: The file to read.
        absent: Text for the error if the file does not exist.
        largest: Largest number of bytes.

    Raises:
        McaError: The path does not exist, cannot be read, is too large, or is not a regular file.
    """
    try:
        with os.fdopen(open_regular(file), "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > largest:
                raise McaError(f"{file}: has {size} bytes, at most {largest} are read; it is damaged")
            return stream.read(largest)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise McaError(f"{file}: no such file; {absent}") from None
        raise McaError(f"{file}: cannot be read ({error.strerror})") from None


def read_text(file: Path, absent: str = "expected a file") -> str:
    """Return the contents of ``file`` as UTF-8 text; see :func:`read_bytes`."""
    try:
        return read_bytes(file, absent).decode("utf-8")
    except UnicodeDecodeError as error:
        raise McaError(f"{file}: cannot be read ({error}); expected UTF-8") from None


def read_json(file: Path, absent: str = "expected a file") -> JsonObject:
    """Return the JSON object in ``file``; see :func:`read_bytes` and :func:`parse_object`."""
    return parse_object(read_text(file, absent), str(file))


def parse_record(text: str) -> JsonObject:
    """Return the JSON object in ``text``; empty if there is none, as in an incomplete line."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def parse_object(text: str, where: str) -> JsonObject:
    """Parse the JSON object ``text`` and check that it can be written again.

    Raises:
        McaError: The text is not JSON, not an object, too deep, or has half of a surrogate pair; ``where`` names it.
    """
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise McaError(f"{where}: cannot be read (not valid JSON: {error})") from None
    except ValueError:  # Python's own limit
        raise McaError(f"{where}: cannot be read (it has a number of thousands of digits)") from None
    except RecursionError:
        raise McaError(f"{where}: cannot be read (not valid JSON: nested too deeply)") from None
    if not isinstance(document, dict):
        raise McaError(f"{where}: expected a JSON object, not {type(document).__name__}")
    if any(depth > _DEEPEST for depth in _depths(document)):
        raise McaError(f"{where}: cannot be read (nested more than {_DEEPEST} levels deep)")
    _require_text(document, text, where)
    return document


def _depths(document: JsonObject) -> Iterator[int]:
    """Yield the level of every nesting depth, the outermost first; stop below the deepest allowed one."""
    level: list[Typed] = [document]
    depth = 0
    while level and depth <= _DEEPEST:
        depth += 1
        yield depth
        inner = (node.values() if isinstance(node, dict) else node for node in level)
        level = [value for values in inner for value in values if isinstance(value, dict | list)]


def _require_text(document: JsonObject, text: str, where: str) -> None:
    """Raise `McaError` for half of a surrogate pair, which is valid JSON but cannot be written as UTF-8."""
    if "\\ud" not in text and "\\uD" not in text:
        return
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        character = error.object[error.start : error.end]
        raise McaError(
            f"{where}: cannot be read ({character!r:.20} is half a character); correct the text"
        ) from None
