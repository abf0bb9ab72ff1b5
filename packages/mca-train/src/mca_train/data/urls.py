"""Remote files that ``fsspec`` opens: required packages, local copies, and one-line errors.

`files` reads the rows.
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
_MAX_LISTED = 8  # up to this number, each file is named
_EXTRAS = {"s3fs": "'mca-train[s3]'", "gcsfs": "'mca-train[gcs]'"}
_CLIENTS = ("fsspec", "gcsfs", "asyncio")  # they log each attempt with its traceback


def is_url(file: str) -> bool:
    """Return True for a URL that ``fsspec`` opens: ``s3://``, ``gs://``, ``hf://``, ``https://``, ..."""
    return "://" in file


def strip_query(file: str) -> str:
    """Return a URL without its query and fragment."""
    return re.split("[?#]", file, maxsplit=1)[0] if file.startswith(_WEB) else file


def escape_pattern(file: str) -> str:
    """Escape ``file``, because ``datasets`` treats names as patterns."""
    if file.startswith(_WEB):
        return file  # a query begins with a question mark
    path = Path(file)
    return glob.escape(file if is_url(file) else str(path.parent.resolve() / path.name))


def describe_files(files: Sequence[str]) -> str:
    """Describe ``files`` independently of their folder; many files are identified by a digest."""
    names = [Path(strip_query(file)).name for file in files]
    if len(names) <= _MAX_LISTED:
        return ", ".join(names)
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
    return f"{names[0]}, ..., {names[-1]} ({len(names)} files, {digest})"


def to_hub_url(file: str) -> str:
    """Return the ``hf://`` form of a URL of the Hub, whose client finds the token; other names unchanged."""
    if not file.startswith(_WEB):
        return file
    import datasets

    start = f"{datasets.config.HF_ENDPOINT}/"
    if not file.startswith(start) or "/resolve/" not in file:
        return file
    return "hf://" + strip_query(file).removeprefix(start).replace("/resolve/", "@", 1)


def require_client(file: str, key: str) -> None:
    """Raise an error for a URL with an unknown file system, or one that needs a missing package.

    Clients do not log from here on; their failures are reported in one line.

    Args:
        file: URL; ``simplecache::s3://bucket/rows.jsonl`` needs two file systems.
        key: Argument that names it, for errors.

    Raises:
        UsageError: The URL cannot be opened here.
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
                f"{key}: {file}: '{scheme}' is no file system that fsspec knows; expected a path, or a URL "
                "such as s3://bucket/rows.jsonl, gs://..., hf://... or https://..."
            ) from error
        except ImportError as error:
            package = getattr(error.__cause__, "name", None) or scheme
            raise UsageError(
                f"{key}: {file} needs the package {package}, which is not installed; "
                f"pip install {_EXTRAS.get(package, package)}"
            ) from error


def require_readable(file: str, key: str) -> None:
    """Raise an error for a URL without a readable file.

    Raises:
        McaError: The file does not exist, or may not be read.
    """
    with translate_url_errors(key, file):
        system, path = _open_filesystem(to_hub_url(file))
        system.info(path)


def download(file: str, key: str) -> Path:
    """Download a file once per machine and version, and return the local copy.

    ``datasets`` would keep the first copy forever, even if the remote file changes. The file at the returned path never
    changes, even if other processes download a newer version.

    Args:
        file: URL.
        key: Argument that names it, for errors.

    Raises:
        McaError: The download fails.
    """
    import datasets

    with translate_url_errors(key, file):
        url = to_hub_url(file)
        has_version = _has_version(url)
        settings = datasets.DownloadConfig(force_download=not has_version)
        copy = Path(datasets.DownloadManager(download_config=settings).download(url))
        return copy if has_version else _content_addressed_copy(copy)


def _content_addressed_copy(copy: Path) -> Path:
    """Return ``copy`` under a name with its content hash, so that the cache of ``datasets`` finds it again."""
    held = copy.with_name(f"{copy.name}.{secrets.token_hex(4)}")
    try:
        os.link(copy, held)  # another process may replace it with a newer version
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
    """Return True if the server identifies versions of the file."""
    if file.startswith(("hf://", "file://")):
        return not file.startswith("hf://buckets/")
    system, path = _open_filesystem(file)
    return not {"ETag", "etag"}.isdisjoint(system.info(path))


def _open_filesystem(url: str) -> "tuple[AbstractFileSystem, str]":
    """Return the file system and the path of a URL; web clients use the proxy of the environment."""
    from fsspec.core import url_to_fs

    schemes = {link.partition("://")[0] for link in url.split("::")} & {"http", "https"}
    found: tuple[AbstractFileSystem, str] = url_to_fs(
        url, **{scheme: {"client_kwargs": {"trust_env": True}} for scheme in schemes}
    )
    return found


def read_url(file: str, medium: str = "image") -> bytes:
    """Read the file at a URL; ``medium`` names it in errors.

    Raises:
        McaError: The download fails.
    """
    require_client(file, medium)
    with translate_url_errors(medium, file):
        system, path = _open_filesystem(to_hub_url(file))
        with system.open(path, "rb") as stream:
            data: bytes = stream.read()
    return data


@contextmanager
def translate_url_errors(key: str, file: str) -> Iterator[None]:
    """Context that turns errors of the client into one line.

    Raises:
        McaError: Reading fails.
    """
    try:
        yield
    except Exception as error:  # errors of aiohttp, botocore, google and others
        raise download_error(key, file, error) from error


def download_error(key: str, file: str, error: BaseException) -> McaError:
    """Return the one-line error for a failed read of a URL."""
    subject = f"{key}: {file}"
    if any(type(each).__name__ == "OfflineModeIsEnabled" for each in _causes(error)):
        return McaError(
            f"{subject} cannot be fetched in the offline mode of the Hub's libraries; "
            "unset HF_HUB_OFFLINE, or name a copy on this machine"
        )
    cause = _reason(error)
    if cause is None:
        return McaError(
            f"{subject}: there is no such file or bucket, or no right to see it; check the URL and the credentials"
        )
    reason = redacted(" ".join(str(cause).split())) or type(cause).__name__
    return McaError(
        f"{subject} cannot be fetched: {reason[:200]}; check the URL, the credentials and the network"
    )


def is_missing_file(error: BaseException) -> bool:
    """Return True if ``error`` or one of its causes is a missing file."""
    return any(isinstance(each, FileNotFoundError) for each in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _reason(error: BaseException) -> BaseException | None:
    """Return the cause of a failure; None: the file is missing (clients also call refused connections so)."""
    if not is_missing_file(error):
        return error.__cause__ or error
    found = [each for each in _causes(error) if isinstance(each, FileNotFoundError)][-1].__cause__
    is_absence = found is None or isinstance(found, LookupError) or _status(found) in (404, 410)
    return None if is_absence else found


def _status(error: BaseException) -> object:
    """Return the HTTP status in a client's error."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # of botocore
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    places = ((error, "status"), (response, "status_code"), (error, "code"))
    return next(
        (value for holder, name in places if (value := getattr(holder, name, None)) is not None), None
    )
