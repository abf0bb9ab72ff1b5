"""`RowPaths` decides which file a path or an address in a row opens.

Rows of local files open any path and any address. Rows of the Hub or of an address may have been written by others:
they open only what is in the same repository, or below the folder of their file.
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
from mca_train.data.urls import is_url, strip_query, to_hub_url

_LOCAL = ("file", "local")
_REPOSITORY_TYPES = ("datasets", "spaces", "models", "buckets")


@dataclass(frozen=True)
class RowPaths:
    """The files that rows may open.

    Args:
        folder: What relative paths start from, a directory or an address; None: there is no one folder.
        places: The repositories and the folders at addresses that the rows are from; empty: they are local.
        caches: Directories in which ``datasets`` keeps what it fetched with the rows, and names by absolute paths.
    """

    folder: str | None = None
    roots: tuple[str, ...] = ()
    caches: tuple[Path, ...] = ()

    def resolve(self, text: str) -> str:
        """Return the path or the address of the file that a row calls ``text``.

        Raises:
            McaError: Its rows may not open it, or there is nothing that it is relative to.
        """
        if not text:
            raise McaError("the path of an image is empty; name a file, or leave the image out of the row")
        if is_url(text):
            _require_plain(text)
            return self._allowed(text, text)
        path = Path(text)
        if path.is_absolute():
            if self.roots and not self._is_cached(path):
                raise self._outside_error(text)
            return str(path)
        if self.folder is None:
            raise McaError(
                f"image {text} is a relative path, and the rows are not from files of one folder; set image_folder"
            )
        if is_url(self.folder):
            return self._allowed(_join_url(self.folder, text), text)
        if not self.roots:
            return str(Path(self.folder, text))
        try:
            return str(resolve_inside(Path(self.folder), text))
        except McaError as error:
            raise self._outside_error(text) from error

    def _allowed(self, address: str, text: str) -> str:
        if self.roots and not any(_is_within(address, root) for root in self.roots):
            raise self._outside_error(text)
        return address

    def _is_cached(self, path: Path) -> bool:
        return any(path.resolve().is_relative_to(cache.resolve()) for cache in self.caches)

    def _outside_error(self, text: str) -> McaError:
        roots = [self.folder] if self.folder and not is_url(self.folder) else []
        return McaError(
            f"image {text} is outside of {' and '.join([*roots, *self.roots])}, and rows that are not from a local "
            "file open nothing else; expected a relative path or an address there; fetch rows and images, and name the "
            "local file"
        )


def row_paths(files: Sequence[str], image_folder: str | None, revision: str | None = None) -> RowPaths:
    """Return what the rows of ``files`` may open.

    Args:
        files: Paths, addresses, or a dataset of the Hub.
        image_folder: What relative paths start from; None: the folder of ``files``, if it is one.
        revision: Of the dataset of the Hub.
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
    """Return the path of a file of this machine; None: it is elsewhere."""
    if not is_url(file):
        return file
    scheme, mark, path = file.rpartition("::")[2].partition("://")
    return path or scheme if scheme in _LOCAL or not mark else None


def _caches(name: str) -> list[Path]:
    """Return where the libraries keep the files of a dataset of the Hub."""
    from datasets import config

    downloads = (config.DOWNLOADED_DATASETS_PATH, config.EXTRACTED_DATASETS_PATH)
    return [dataset_cache(name), *map(Path, downloads)]


def _require_plain(address: str) -> None:
    """Refuse an address that names a file of this machine, or can."""
    if "::" in address:
        raise McaError(
            f"image {address} is a chain of protocols; expected a path or one address (s3://..., https://...); remove "
            "the :: and what it joins"
        )
    scheme, _, path = address.partition("://")
    if scheme in _LOCAL:
        raise McaError(f"image {address} begins with {scheme}://; expected a path; write {path}")


def _join_url(folder: str, text: str) -> str:
    """Return the address of ``text`` below an address; ``..`` is resolved here, as clients send it or do not."""
    if ".." not in text.split("/"):
        return f"{folder}/{text}"
    scheme, _, rest = folder.partition("://")
    return f"{scheme}://{posixpath.normpath(f'{rest}/{text}')}"


def _is_within(address: str, root: str) -> bool:
    host, path = _split_url(to_hub_url(address))
    own_host, own_path = _split_url(root)
    return host == own_host and path is not None and path[: len(own_path or ())] == (own_path or [])


def _split_url(address: str) -> tuple[str, list[str] | None]:
    """Return the host, bucket or repository of an address, and the components of its path; None: they lead out."""
    scheme, _, rest = strip_query(address).partition("://")
    if scheme == "hf":
        names = rest.split("/")
        count = 3 if names[0] in _REPOSITORY_TYPES else 2
        name, _, revision = "/".join(names[:count]).partition("@")
        is_wrong = ".." in unquote(revision).split("/")
        return f"hf://{name}", None if is_wrong else _components("/".join(names[count:]))
    host, _, path = rest.partition("/")
    if scheme in ("http", "https"):
        host = host if "\\" in host else host.rpartition("@")[2].lower()  # clients differ in what \\ ends
    return f"{scheme}://{host}", _components(path)


def _components(path: str) -> list[str] | None:
    """Return the names of a path, however often it is URL-encoded; None: it leads above its start."""
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
