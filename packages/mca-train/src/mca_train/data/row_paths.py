"""Restriction of the files that paths and URLs in a row may open.

Rows of local files may open any path and any URL. Rows from the Hub or from a URL may be untrusted: they may open only
files of the same repository, or below the folder of their file.
"""

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from mca_config.errors import McaError
from mca_config.files import resolve_inside
from mca_models.hub import dataset_cache
from mca_train.data.files import reader_name
from mca_train.data.message_parts import NOUNS
from mca_train.data.urls import is_url, strip_query, to_hub_url

_LOCAL = ("file", "local")
_REPOSITORY_TYPES = ("datasets", "spaces", "models", "buckets")


@dataclass(frozen=True)
class RowPaths:
    """Files that rows may open.

    Args:
        folder: Base of relative paths, a directory or a URL; None: there is no single base.
        roots: Repositories and folder URLs that the rows are from; empty: the rows are local.
        caches: Directories in which ``datasets`` stores downloads, which rows name by absolute paths.
    """

    folder: str | None = None
    roots: tuple[str, ...] = ()
    caches: tuple[Path, ...] = ()

    def resolve(self, text: str, medium: str = "image") -> str:
        """Return the path or the URL of the file that a row calls ``text``; ``medium`` names it in errors.

        Raises:
            McaError: The rows may not open the file, or a relative path has no base.
        """
        if not text:
            raise McaError(f"the path of {NOUNS[medium]} is empty; name a file, or remove it from the row")
        if is_url(text):
            _require_plain(text, medium)
            return self._allowed(text, text, medium)
        path = Path(text)
        if path.is_absolute():
            if self.roots and not self._is_cached(path):
                raise self._outside_error(text, medium)
            return str(path)
        if self.folder is None:
            raise McaError(
                f"{medium} {text} is a relative path, and the rows are not from files of one folder; set image_folder"
            )
        if is_url(self.folder):
            return self._allowed(_join_url(self.folder, text), text, medium)
        if not self.roots:
            return str(Path(self.folder, text))
        try:
            return str(resolve_inside(Path(self.folder), text))
        except McaError as error:
            raise self._outside_error(text, medium) from error

    def _allowed(self, url: str, text: str, medium: str) -> str:
        if self.roots and not any(_is_within(url, root) for root in self.roots):
            raise self._outside_error(text, medium)
        return url

    def _is_cached(self, path: Path) -> bool:
        return any(path.resolve().is_relative_to(cache.resolve()) for cache in self.caches)

    def _outside_error(self, text: str, medium: str) -> McaError:
        roots = [self.folder] if self.folder and not is_url(self.folder) else []
        return McaError(
            f"{medium} {text} is outside of {' and '.join([*roots, *self.roots])}, and rows that are not from a local "
            "file open nothing else; expected a relative path or a URL there; fetch rows and images, and name the "
            "local file"
        )


def row_paths(files: Sequence[str], image_folder: str | None, revision: str | None = None) -> RowPaths:
    """Return the files that the rows of ``files`` may open.

    Args:
        files: Paths, URLs, or a dataset on the Hub.
        image_folder: Base of relative paths; None: the folder of ``files``, if there is only one.
        revision: Revision of the dataset on the Hub.
    """
    folders: set[str | None] = set()
    roots: list[str] = []
    caches: list[Path] = []
    for file in files:
        if _is_hub_dataset(file):
            folder = root = f"hf://datasets/{file}" + (f"@{quote(revision, safe='')}" if revision else "")
            caches += _caches(file)
        elif (local := _local_path(file)) is not None:
            path = Path(local)
            folders.add(str(path.parent if path.suffix and not path.is_dir() else path))
            continue
        else:
            folder = strip_query(to_hub_url(file.rpartition("::")[2])).rpartition("/")[0]
            root = _split_url(folder)[0] if folder.startswith("hf://") else folder
        folders.add(None if "::" in file else folder)
        roots.append(root)
    if image_folder is None:
        start = folders.pop() if len(folders) == 1 else None
    else:
        start = image_folder
        roots += [image_folder] if roots and is_url(image_folder) else []
    return RowPaths(start, tuple(dict.fromkeys(roots)), tuple(caches))


def _is_hub_dataset(file: str) -> bool:
    return not is_url(file) and reader_name(file) == "a dataset" and not Path(file).exists()


def _local_path(file: str) -> str | None:
    """Return the path of a local file; None: the file is remote."""
    if not is_url(file):
        return file
    scheme, mark, path = file.rpartition("::")[2].partition("://")
    return path or scheme if scheme in _LOCAL or not mark else None


def _caches(name: str) -> list[Path]:
    """Return the directories in which the libraries store the files of a dataset on the Hub."""
    from datasets import config

    downloads = (config.DOWNLOADED_DATASETS_PATH, config.EXTRACTED_DATASETS_PATH)
    return [dataset_cache(name), *map(Path, downloads)]


def _require_plain(url: str, medium: str) -> None:
    """Raise an error for a URL that names, or may name, a local file."""
    if "::" in url:
        raise McaError(
            f"{medium} {url} is a chain of protocols; expected a path or one URL (s3://..., https://...); remove "
            "the :: and what it joins"
        )
    scheme, _, path = url.partition("://")
    if scheme in _LOCAL:
        raise McaError(f"{medium} {url} begins with {scheme}://; expected a path; write {path}")


def _join_url(folder: str, text: str) -> str:
    """Join a path to a URL, with ``..`` resolved here, because clients differ in doing so."""
    if ".." not in text.split("/"):
        return f"{folder}/{text}"
    scheme, _, rest = folder.partition("://")
    return f"{scheme}://{posixpath.normpath(f'{rest}/{text}')}"


def _is_within(url: str, root: str) -> bool:
    host, path = _split_url(to_hub_url(url))
    own_host, own_path = _split_url(root)
    return host == own_host and path is not None and path[: len(own_path or ())] == (own_path or [])


def _split_url(url: str) -> tuple[str, list[str] | None]:
    """Return the host, bucket or repository of a URL, and its path components; None: the path leaves the root."""
    scheme, _, rest = strip_query(url).partition("://")
    if scheme == "hf":
        names = rest.split("/")
        count = 3 if names[0] in _REPOSITORY_TYPES else 2
        name, _, revision = "/".join(names[:count]).partition("@")
        is_wrong = ".." in unquote(revision).split("/")
        return f"hf://{name}", None if is_wrong else _components("/".join(names[count:]))
    host, _, path = rest.partition("/")
    if scheme in ("http", "https"):
        host = host if "\\" in host else host.rpartition("@")[2].lower()  # clients parse \\ differently
    return f"{scheme}://{host}", _components(path)


def _components(path: str) -> list[str] | None:
    """Return the components of a path, fully URL-decoded; None: it leaves the root."""
    while (plain := unquote(path)) != path:
        path = plain
    found: list[str] = []
    for name in path.replace("\\", "/").split("/"):
        if name == ".." and not found:
            return None
        if name == "..":
            found.pop()
        elif name not in ("", "."):
            found.append(name)
    return found
