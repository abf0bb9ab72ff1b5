"""Files at addresses that ``fsspec`` opens: which package reads them, one copy on this machine, errors in one line.

How files are named and what their rows are is decided in `files`.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mca_config.errors import McaError, UsageError

_EXTRAS = {"s3fs": "'mca-train[s3]'", "gcsfs": "'mca-train[gcs]'"}
_CLIENTS = (
    "fsspec",
    "gcsfs",
    "asyncio",
)  # log each attempt with its traceback, and what a fork leaves behind


def is_address(file: str) -> bool:
    """Whether ``file`` is one that ``fsspec`` opens: ``s3://``, ``gs://``, ``hf://``, ``https://``, ..."""
    return "://" in file


def require_client(file: str, key: str) -> None:
    """Refuses an address whose file system nobody knows, or needs a package that is not installed.

    Clients are quiet from here on: what they fail at is reported in one line.

    Args:
        file: An address; ``simplecache::s3://bucket/rows.jsonl`` needs two file systems.
        key: The argument that named it, for errors.

    Raises:
        UsageError: It cannot be opened here.
    """
    from fsspec import get_filesystem_class

    for name in _CLIENTS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    for link in file.split("::"):
        scheme = link.partition("://")[0]
        try:
            get_filesystem_class(scheme)
        except ValueError as error:
            raise UsageError(
                f"{key}: {file}: '{scheme}' is no file system that fsspec knows; expected a path, or an address "
                "such as s3://bucket/rows.jsonl, gs://..., hf://... or https://..."
            ) from error
        except ImportError as error:
            package = getattr(error.__cause__, "name", None) or scheme
            raise UsageError(
                f"{key}: {file} needs the package {package}, which is not installed; "
                f"pip install {_EXTRAS.get(package, package)}"
            ) from error


def require_there(file: str, key: str) -> None:
    """Refuses an address where no file can be read.

    Raises:
        McaError: There is none, or it may not be read.
    """
    from fsspec.core import url_to_fs

    with fetching(key, file):
        system, path = url_to_fs(file)
        system.info(path)


def fetched(file: str, key: str) -> Path:
    """A copy of what stands at an address, made once on this machine for as long as the file stays the same.

    ``datasets`` itself would keep the first copy for ever, whatever is written to the address later.

    Args:
        file: An address.
        key: The argument that named it, for errors.

    Raises:
        McaError: It cannot be fetched.
    """
    import datasets

    with fetching(key, file):
        settings = datasets.DownloadConfig(force_download=not _has_version(file))
        return Path(datasets.DownloadManager(download_config=settings).download(file))


def _has_version(file: str) -> bool:
    """Whether its server says when it has changed."""
    from fsspec.core import url_to_fs

    if file.startswith(("hf://", "file://")):
        return True
    system, path = url_to_fs(file)
    return not {"ETag", "etag"}.isdisjoint(system.info(path))


def read_whole(file: str) -> bytes:
    """What stands at an address.

    Raises:
        McaError: It cannot be fetched.
    """
    import fsspec

    require_client(file, "image")
    with fetching("image", file), fsspec.open(file, "rb") as stream:
        data: bytes = stream.read()
    return data


@contextmanager
def fetching(key: str, file: str) -> Iterator[None]:
    """A block that reads from an address: what its client finds becomes one line.

    Raises:
        McaError: It cannot be fetched.
    """
    try:
        yield
    except Exception as error:  # of aiohttp, botocore, google and others, each with errors of its own
        if is_missing(error):
            raise McaError(f"{key}: {file}: there is no such file or bucket") from error
        reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        raise McaError(
            f"{key}: {file} cannot be fetched: {reason[:200]}; check the address, the credentials and the network"
        ) from error


def is_missing(error: BaseException) -> bool:
    """Whether ``error``, or what it comes from, is that a file is not there."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, FileNotFoundError):
            return True
        found = found.__cause__
    return False
