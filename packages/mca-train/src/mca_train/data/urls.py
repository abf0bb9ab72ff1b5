"""Files at addresses that ``fsspec`` opens: which package reads them, one copy on this machine, errors in one line.

How files are named and what their rows are is decided in `files`.
"""

import glob
import hashlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mca_config.errors import McaError, UsageError
from mca_config.redaction import redacted

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_WEB = ("http://", "https://")
_MAX_LISTED = 8  # of so many files, each is named
_EXTRAS = {"s3fs": "'mca-train[s3]'", "gcsfs": "'mca-train[gcs]'"}
_CLIENTS = (
    "fsspec",
    "gcsfs",
    "asyncio",
)  # log each attempt with its traceback, and what a fork leaves behind


def is_url(file: str) -> bool:
    """Whether ``file`` is one that ``fsspec`` opens: ``s3://``, ``gs://``, ``hf://``, ``https://``, ..."""
    return "://" in file


def strip_query(file: str) -> str:
    """The end of an address that names the file: what stands before the query of ``https://``."""
    return re.split("[?#]", file, maxsplit=1)[0] if file.startswith(_WEB) else file


def escape_pattern(file: str) -> str:
    """What ``datasets``, which takes names for patterns, finds ``file`` alone by."""
    if file.startswith(_WEB):
        return file  # a query begins with a question mark
    path = Path(file)
    return glob.escape(file if is_url(file) else str(path.parent.resolve() / path.name))


def describe_files(files: Sequence[str]) -> str:
    """What ``files`` are called, wherever they stand; many are told from others by a digest."""
    names = [Path(strip_query(file)).name for file in files]
    if len(names) <= _MAX_LISTED:
        return ", ".join(names)
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
    return f"{names[0]}, ..., {names[-1]} ({len(names)} files, {digest})"


def to_hub_url(file: str) -> str:
    """``hf://`` for a file's address among the pages of the Hub, whose client finds the token; others as they are."""
    if not file.startswith(_WEB):
        return file
    import datasets

    start = f"{datasets.config.HF_ENDPOINT}/"
    if not file.startswith(start) or "/resolve/" not in file:
        return file
    return "hf://" + strip_query(file).removeprefix(start).replace("/resolve/", "@", 1)


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
    for link in to_hub_url(file).split("::"):
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


def require_readable(file: str, key: str) -> None:
    """Refuses an address where no file can be read.

    Raises:
        McaError: There is none, or it may not be read.
    """
    with translate_url_errors(key, file):
        system, path = _open_filesystem(to_hub_url(file))
        system.info(path)


def download(file: str, key: str) -> Path:
    """A copy of what stands at an address, made once on this machine for as long as the file stays the same.

    ``datasets`` itself would keep the first copy for ever, whatever is written to the address later. What stands at the
    path that this returns stays as it is, whatever other processes fetch.

    Args:
        file: An address.
        key: The argument that named it, for errors.

    Raises:
        McaError: It cannot be fetched.
    """
    import datasets

    with translate_url_errors(key, file):
        address = to_hub_url(file)
        has_version = _has_version(address)
        settings = datasets.DownloadConfig(force_download=not has_version)
        copy = Path(datasets.DownloadManager(download_config=settings).download(address))
        return copy if has_version else _content_addressed_copy(copy)


def _content_addressed_copy(copy: Path) -> Path:
    """``copy`` under a name by its content: the same one, with what ``datasets`` made of it, is found the next time."""
    held = copy.with_name(f"{copy.name}.{secrets.token_hex(4)}")
    try:
        os.link(copy, held)  # another process may put a newer one in its place
    except OSError:
        shutil.copyfile(copy, held)
    with held.open("rb") as stream:
        place = copy.with_name(f"{copy.name}.{hashlib.file_digest(stream, 'sha256').hexdigest()[:32]}")
    if place.is_file():
        held.unlink()
    else:
        held.replace(place)
    return place


def _has_version(file: str) -> bool:
    """Whether its server says when it has changed."""
    if file.startswith(("hf://", "file://")):
        return not file.startswith("hf://buckets/")
    system, path = _open_filesystem(file)
    return not {"ETag", "etag"}.isdisjoint(system.info(path))


def _open_filesystem(address: str) -> "tuple[AbstractFileSystem, str]":
    """The file system of ``address``, and the path there; a web client takes the proxy that the environment names."""
    from fsspec.core import url_to_fs

    schemes = {link.partition("://")[0] for link in address.split("::")} & {"http", "https"}
    found: tuple[AbstractFileSystem, str] = url_to_fs(
        address, **{scheme: {"client_kwargs": {"trust_env": True}} for scheme in schemes}
    )
    return found


def read_url(file: str) -> bytes:
    """What stands at an address.

    Raises:
        McaError: It cannot be fetched.
    """
    require_client(file, "image")
    with translate_url_errors("image", file):
        system, path = _open_filesystem(to_hub_url(file))
        with system.open(path, "rb") as stream:
            data: bytes = stream.read()
    return data


@contextmanager
def translate_url_errors(key: str, file: str) -> Iterator[None]:
    """A block that reads from an address: what its client finds becomes one line.

    Raises:
        McaError: It cannot be fetched.
    """
    try:
        yield
    except Exception as error:  # of aiohttp, botocore, google and others, each with errors of its own
        raise download_error(key, file, error) from error


def download_error(key: str, file: str, error: BaseException) -> McaError:
    """What to tell of an address where reading ended with ``error``, in one line."""
    subject = f"{key}: {file}"
    if any(type(each).__name__ == "OfflineModeIsEnabled" for each in _causes(error)):
        return McaError(
            f"{subject} cannot be fetched in the offline mode of the Hub's libraries; "
            "unset HF_HUB_OFFLINE, or name a copy on this machine"
        )
    cause = _reason(error)
    if cause is None:
        return McaError(
            f"{subject}: there is no such file or bucket, or no right to see it; check the address and the credentials"
        )
    reason = redacted(" ".join(str(cause).split())) or type(cause).__name__
    return McaError(
        f"{subject} cannot be fetched: {reason[:200]}; check the address, the credentials and the network"
    )


def is_not_found(error: BaseException) -> bool:
    """Whether ``error``, or what it comes from, is that a file is not there."""
    return any(isinstance(each, FileNotFoundError) for each in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _reason(error: BaseException) -> BaseException | None:
    """What went wrong; None: nothing stands there. Clients call a connection that is refused "not found" too."""
    if not is_not_found(error):
        return error.__cause__ or error
    found = [each for each in _causes(error) if isinstance(each, FileNotFoundError)][-1].__cause__
    is_absence = found is None or isinstance(found, LookupError) or _status(found) in (404, 410)
    return None if is_absence else found


def _status(error: BaseException) -> object:
    """The number that a server answered with, where the error of a client keeps it."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # of botocore
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    places = ((error, "status"), (response, "status_code"), (error, "code"))
    return next(
        (value for holder, name in places if (value := getattr(holder, name, None)) is not None), None
    )
