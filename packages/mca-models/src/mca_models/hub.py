"""Models of the Hugging Face Hub by id (``org/name`` or ``org/name@revision``): download and upload.

Downloads go through ``huggingface_hub`` (the extra ``hub``), into its cache, with its token, endpoint and offline mode;
interrupted downloads are resumed, and processes that need the same file wait for one another. Only the files that are
needed are fetched. A local directory of that name takes precedence.
"""

import logging
import os
import re
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mca_config.errors import McaError, UsageError
from mca_config.files import resolve_inside
from mca_config.redaction import redacted

if TYPE_CHECKING:
    from huggingface_hub import HfApi

logger = logging.getLogger(__name__)

Needed = Literal["all", "config", "tokenizer"]
"""Files of a repository: all of the model's, its configuration alone, or all but weights."""

_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
_CONFIGS = (
    *("config.json", "generation_config.json", "mca_config.json", "adapter_config.json"),
    "latest_checkpointed_iteration.txt",
)
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".tflite"),
    *(".index.json", ".ot", ".zip", ".tar", ".mlmodel"),
)
_ADAPTER, _TEMPLATES = "adapter_config.json", "additional_chat_templates"
_MARKS = (_ADAPTER, "mca_config.json", "latest_checkpointed_iteration.txt")  # of the kind
_OF_TOKENIZERS = (
    "tokenizer.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that are read before a tokenizer's other files, or in addition to them."""
_OF_MODELS = (
    *("generation_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    "processor_config.json",
)
_PICKLED = "pytorch_model"
_ADAPTERS_WEIGHTS = re.compile(r"adapter_model\.(safetensors|bin)")
_ANY_WEIGHTS = re.compile(
    rf"{_ADAPTERS_WEIGHTS.pattern}|(pytorch_)?model(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
)
_BEGINNING = 1 << 17  # bytes of a file that are asked for first; most headers are shorter
_LONGEST_HEADER = 100_000_000  # bytes that safetensors allows


def is_hub_id(name: str | Path) -> bool:
    """Return whether ``name`` can only mean a model of the Hub: it looks like an id, and no such path exists."""
    text = str(name)
    if isinstance(name, Path) and name.is_absolute():
        return False
    owner = text.partition("/")[0]
    return _ID.fullmatch(text) is not None and not Path(text).exists() and not Path(owner).exists()


def resolve_directory(name: str | Path, needed: Needed = "all") -> Path:
    """The directory of ``name``: itself, or of a Hub id the snapshot in the cache, downloaded if it is not there.

    Args:
        name: A path, or an id with or without ``@revision``.
        needed: What is fetched of a repository.

    Raises:
        McaError: The Hub has no such model, refuses it, or cannot be reached.
    """
    if not is_hub_id(name):
        return Path(name)
    repository, revision = _parts(name)
    with _naming(str(name)):
        from huggingface_hub import HfApi, constants

        api, patterns = HfApi(), ["*config.json"]
        if not constants.HF_HUB_OFFLINE:
            patterns = select_files(_files(api, repository, revision), needed)
        return Path(api.snapshot_download(repository, revision=revision, allow_patterns=patterns))


def dataset_cache(name: str) -> Path:
    """Return the directory in which the client keeps the files of the dataset ``name``."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE, f"datasets--{name.replace('/', '--')}")


@contextmanager
def headers_only(name: str | Path, *, needs_weights: bool) -> Iterator[Path]:
    """A directory to plan with: of a Hub id the small files, and of each safetensors file the header alone.

    The files have their true lengths, but no weights: they are sparse. The directory is gone after the block.

    Args:
        name: A path, or an id with or without ``@revision``.
        needs_weights: The configuration is not enough where the weights are in files without such a header.

    Raises:
        McaError: As `resolve_directory`, or weights are needed and in such files.
    """
    if not is_hub_id(name):
        yield Path(name)
        return
    repository, revision = _parts(name)
    import tempfile  # imports much that a command's help does without

    with tempfile.TemporaryDirectory(prefix="mca-hub-") as root:
        with _naming(str(name)):
            folder = _headers(repository, revision, Path(root) / repository, needs_weights=needs_weights)
        yield folder


def _headers(repository: str, revision: str | None, folder: Path, *, needs_weights: bool) -> Path:
    from huggingface_hub import HfApi, constants, hf_hub_url

    api = HfApi()
    if constants.HF_HUB_OFFLINE:
        return resolve_directory(_named(repository, revision))
    files = select_files(_files(api, repository, revision), "all")
    if pickled := [file for file in files if file.startswith(_PICKLED)]:
        what = f"{_named(repository, revision)}: its weights are in {pickled[0]}, of which no header is fetched alone"
        if needs_weights:
            raise McaError(f"{what}; fetch the model (hf download {repository}) and name its directory")
        logger.warning("%s: the plan is made from config.json, without the sizes of the files", what)
    for file in files:
        resolve_inside(folder, file).parent.mkdir(parents=True, exist_ok=True)
        if file.endswith(".safetensors"):
            address = hf_hub_url(repository, file, revision=revision, endpoint=api.endpoint)
            _write_header(address, folder / file)
        elif not (file.startswith(_PICKLED) or file.endswith((".pt", ".distcp"))):
            cached = api.hf_hub_download(repository, file, revision=revision)
            (folder / file).write_bytes(Path(cached).read_bytes())
    return folder


def _named(repository: str, revision: str | None) -> str:
    return repository if revision is None else f"{repository}@{revision}"


def require_upload(name: str) -> None:
    """Raise before any work if nothing could be uploaded as the model ``name``.

    Raises:
        McaError: It is no id, the client is not installed, or the Hub is not reached or does not know the user.
    """
    if _ID.fullmatch(name) is None:
        raise UsageError(f"--push_to_hub {name}: expected an id like org/name or org/name@branch")
    with _naming_upload(name):
        from huggingface_hub import HfApi

        HfApi().whoami()


def upload(folder: Path, name: str) -> str:
    """Upload ``folder`` as the model ``name`` (see `require_upload`), which is made if it is not there; its address.

    Then what `stale_files` finds there is deleted; the repository's history keeps it.

    Raises:
        McaError: The Hub refuses it or cannot be reached, or an adapter would hide a model.
    """
    repository, revision = _parts(name)
    with _naming_upload(name):
        from huggingface_hub import CommitOperationDelete, HfApi

        api = HfApi()
        api.create_repo(repository, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        files = _files(api, repository, revision)
        if (folder / _ADAPTER).exists() and "mca_config.json" in files and _ADAPTER not in files:
            raise McaError(
                f"--push_to_hub {name}: the repository holds a whole MCA model, which readers would no longer find "
                "next to an adapter; push the adapter to another repository or branch"
            )
        stale = stale_files(files, folder)
        if stale:
            logger.warning(
                "%s: deleting files of an earlier model in the repository: %s", name, ", ".join(stale)
            )
        api.upload_folder(
            repo_id=repository, folder_path=folder, revision=revision, commit_message="Upload by mca"
        )
        if stale:  # not in the upload's first commit: until its last one the earlier model can be read
            api.create_commit(
                repository,
                [CommitOperationDelete(path_in_repo=file) for file in stale],
                commit_message="Delete what is of an earlier model",
                revision=revision,
            )
        return f"{api.endpoint}/{repository}"


def stale_files(files: Iterable[str], folder: Path) -> list[str]:
    """Return the ``files`` of a repository that readers would take for parts of the model in ``folder``.

    These are files that identify a model, weights under the names that are looked for (with an adapter its weights
    alone), pieces in an iteration that is replaced, and what is read in place of a file of ``folder``. All else stays:
    other iterations, other folders.
    """
    adapts, has_tokenizer = ((folder / file).exists() for file in (_ADAPTER, "tokenizer_config.json"))
    names = {*_MARKS, *(_OF_TOKENIZERS if has_tokenizer else ()), *(() if adapts else _OF_MODELS)}
    weights = _ADAPTERS_WEIGHTS if adapts else _ANY_WEIGHTS

    def is_older(file: str) -> bool:
        top, _, below = file.partition("/")
        if below and top.startswith("iter_"):
            return (folder / top).is_dir()
        return file in names or weights.fullmatch(file) is not None or (top == _TEMPLATES and has_tokenizer)

    return sorted(file for file in files if not (folder / file).exists() and is_older(file))


def select_files(files: Iterable[str], needed: Needed) -> list[str]:
    """Return the files of a repository that are fetched.

    Weights are taken in one format: safetensors, or where there are none ``pytorch_model*.bin``. An MCA checkpoint is
    taken whole. Other folders, and copies in other formats, stay behind.
    """
    names = sorted(files)
    if needed == "config":
        return [name for name in names if name in _CONFIGS]
    if "mca_config.json" in names and needed == "all":
        return names
    top = [name for name in names if "/" not in name or name.startswith(f"{_TEMPLATES}/")]
    small = [name for name in top if not name.endswith(_WEIGHTS) and not name.startswith(".")]
    return small if needed == "tokenizer" else small + _one_format(top)


def _one_format(top: list[str]) -> list[str]:
    for beginning, end in (
        ("model", ".safetensors"),
        ("adapter_model", ".safetensors"),
        ("pytorch_model", ".bin"),
        ("adapter_model", ".bin"),
    ):
        weights = [
            name for name in top if name.startswith(beginning) and name.endswith((end, f"{end}.index.json"))
        ]
        if any(name.endswith(end) for name in weights):
            return weights
    return [name for name in top if name.endswith((".safetensors", ".safetensors.index.json"))]


def _parts(name: str | Path) -> tuple[str, str | None]:
    repository, _, revision = str(name).partition("@")
    return repository, revision or None


def _files(api: "HfApi", repository: str, revision: str | None) -> list[str]:
    return [each.rfilename for each in api.model_info(repository, revision=revision).siblings or []]


def _write_header(address: str, file: Path) -> None:
    """A sparse file with the length and the header of that at ``address``, read by ranges."""
    beginning, size = _range(address, 0, _BEGINNING)
    (length,) = struct.unpack("<Q", beginning[:8]) if len(beginning) >= 8 else (0,)
    if len(beginning) < 8 + length <= size and length <= _LONGEST_HEADER:
        beginning += _range(address, len(beginning), 8 + length)[0]
    with file.open("wb") as stream:
        stream.write(beginning[: 8 + length])
        stream.truncate(size)


def _range(address: str, start: int, stop: int) -> tuple[bytes, int]:
    """Bytes ``start:stop`` of what is at ``address``, and how many there are in all.

    Of a server that sends the whole file instead no more is read than up to ``stop``.
    """
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    span = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    headers, session = {**build_hf_headers(), **span}, get_session()
    with ExitStack() as stack:
        if hasattr(session, "stream"):
            response = stack.enter_context(session.stream("GET", address, headers=headers))
            pieces = response.iter_bytes
        else:  # requests, which the client used before its version 1.0
            response = stack.enter_context(session.get(address, headers=headers, stream=True))
            pieces = response.iter_content
        hf_raise_for_status(response)
        is_part = response.status_code == 206
        size = response.headers.get("content-range" if is_part else "content-length", "").rpartition("/")[2]
        if not size.isdigit():
            raise McaError(
                f"{address}: the server does not say how long the file is; fetch the model instead"
            )
        first, content = 0 if is_part else start, bytearray()
        for piece in pieces(1 << 16):
            content += piece
            if len(content) >= first + stop - start:
                break
    return bytes(content[first : first + stop - start]), int(size)


@contextmanager
def _progress_bars_on_terminal() -> Iterator[None]:
    """A block in which the client draws bars only on a terminal, by one rank of a machine, unless warnings alone count.

    ``HF_HUB_DISABLE_PROGRESS_BARS=0`` draws them everywhere.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    is_first = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) in ("0", "-1")
    is_quiet = logging.getLogger("mca_models").level > logging.INFO
    shows_bars = sys.stderr is not None and sys.stderr.isatty() and is_first and not is_quiet
    if shows_bars or are_progress_bars_disabled() or os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") == "0":
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


_WHY = {
    "RepositoryNotFoundError": "the Hub has no such model, or it is private: check the name, log in with hf auth login",
    "RevisionNotFoundError": "the model has no such revision",
    "GatedRepoError": "access must be granted on its page of the Hub, and you must be logged in (hf auth login)",
    "LocalEntryNotFoundError": "it is not in the cache, and the Hub is not reached (HF_HUB_OFFLINE, network)",
    "IncompleteSnapshotError": "its files in the cache are incomplete, and the Hub is not reached",
    "OfflineModeIsEnabled": "it is not in the cache, and HF_HUB_OFFLINE is set",
}


_INSTALL = (
    "install the extra hub of mca-convert (pip install './packages/mca-convert[hub]' ./packages/mca-config "
    "./packages/mca-models in a clone)"
)


def _naming(name: str) -> AbstractContextManager[None]:
    """Report errors of a download in one line about ``name``."""
    install = (
        f"{name}: no such directory; to read models of the Hub {_INSTALL}, or fetch it: hf download {name} "
        "--local-dir <directory>"
    )
    return _in_one_line(install, f"{name}: no such directory is here, and the Hub answered:", _WHY)


_WHY_NOT_UPLOADED = {
    "LocalTokenNotFoundError": "you are not logged in (hf auth login, or HF_TOKEN)",
    "RepositoryNotFoundError": "you may not write there, or are not logged in (hf auth login, or HF_TOKEN)",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set; unset it to upload",
}


def _naming_upload(name: str) -> AbstractContextManager[None]:
    """Report errors of an upload in one line about ``--push_to_hub name``."""
    install = f"--push_to_hub {name}: needs the Hub's client; {_INSTALL}"
    return _in_one_line(install, f"--push_to_hub {name}:", _WHY_NOT_UPLOADED)


@contextmanager
def _in_one_line(install: str, about: str, known: Mapping[str, str]) -> Iterator[None]:
    """A block whose errors are one line: ``install`` where the client is missing, else the reason behind ``about``."""
    try:
        with _progress_bars_on_terminal():
            yield
    except McaError:
        raise
    except ImportError:
        raise McaError(install) from None
    except Exception as error:  # each HTTP client of the library has its own errors
        raise McaError(f"{about} {_reason(error, known)}") from error


def _reason(error: Exception, known: Mapping[str, str]) -> str:
    """Return the meaning of ``error`` of the Hub's client, if its class is ``known``, else its text."""
    words = [known[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in known]
    return words[0] if words else f"{type(error).__name__}: {redacted(' '.join(str(error).split()))[:200]}"
