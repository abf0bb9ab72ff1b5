"""The files of a checkpoint directory by their names: those that go along with the weights, and all that it may hold.

Weights, indexes and configurations are not among them; whoever writes a checkpoint writes these itself. Nor is what a
training run says of itself: the next run that begins from the model writes files of the same names. A directory with
any other file than those of a checkpoint is not replaced.
"""

import json
import logging
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

from mca_config.errors import McaError
from mca_config.files import (
    has_entry,
    naming_read_errors,
    open_regular,
    read_json,
    resolve_inside,
)
from mca_models.storage.atomic import write_file
from mca_models.storage.staging_folder import close, staging_folders

logger = logging.getLogger(__name__)

_CONFIGS = ("mca_config.json", "config.json")
_WRITTEN = {*_CONFIGS, "latest_checkpointed_iteration.txt"}
_MEGATRON = {"metadata.json", "latest_wandb_artifact_path.txt", "progress.txt"}  # of the source's own kind

RUN_FILES = frozenset(
    {
        "loss.png",
        "report.html",
        "run.json",
        "train_log.jsonl",
        "trainer_state.json",
        "training_args.json",
    }
)
"""Files that `mca_train` (and transformers' Trainer) writes about a run next to its model."""

_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".npz", ".gguf", ".h5", ".msgpack", ".onnx"),
    *(".ot", ".tflite", ".mlmodel"),
    ".index.json",
)

_DATA = (".parquet", ".arrow", *(f".jsonl{packed}" for packed in ("", ".gz", ".bz2", ".xz", ".zst")))
"""Data sets, which no tokenizer or processor reads."""

_SPEAKERS = "spk_dict.pt"
"""Voices of Qwen 2.5 Omni's talker, which transformers reads next to the weights."""

_FOLDERS = ("additional_chat_templates",)
"""Folders with further files of tokenizers; other folders are not part of the model."""

_OF_LOADING = ("is_local", "local_files_only", "name_or_path")
"""Keys of ``tokenizer_config.json`` that transformers writes about how a tokenizer was loaded."""
_OF_TOKENIZERS = ("tokenizer", "chat_template", "special_tokens_map", "added_tokens", "vocab", "merges")
_DIST_MODEL, _OF_MEGATRON = (
    "dist_model",
    ".metadata",
)  # of a torch_dist checkpoint, in an iteration or inside it
_MEGATRON_FOLDERS = ("release", _DIST_MODEL)
_BUFFER_BYTES = 1 << 20


def side_files(source: Path) -> list[Path]:
    """Tokenizer, generation config, chat templates, remote code, licence: all but weights, configs, data, run's files.

    Raises:
        McaError: One cannot be copied: a link that leads out of the directory or nowhere, a pipe, a device, a file
            that may not be read.
    """
    return list(_by_name(source).values())


def _by_name(source: Path) -> dict[str, Path]:
    folders = reversed(_folders(source))  # a file of the first one comes in place of another's
    return {name: _checked(folder, name) for folder in folders for name in sorted(_names(folder))}


def different_tokenizer(path: Path, other: Path) -> list[str]:
    """Return the tokenizer's files in ``other`` that are different or missing in ``path``.

    What ``save_pretrained`` notes about the loading (`_OF_LOADING`) is no difference.
    """
    files = _by_name(other).items()
    return [
        name for name, file in files if file.name.startswith(_OF_TOKENIZERS) and not _equal(path / name, file)
    ]


def config_folder(iteration: Path) -> Path | None:
    """Find the folder with the configuration of a Megatron checkpoint: that of its weights or up to two above."""
    places = (iteration, *list(iteration.resolve().parents)[:2])
    return next((place for place in places if any(has_entry(place, name) for name in _CONFIGS)), None)


def _folders(source: Path) -> list[Path]:
    """Return the folders with the small files of ``source``: also that of the configuration, if it is above."""
    iterations = (folder for folder in (source, source / _DIST_MODEL) if has_entry(folder, _OF_MEGATRON))
    iteration = next(iterations, None)
    above = None if iteration is None else config_folder(iteration)
    if above is None or above.resolve() not in source.resolve().parents:
        return [source]
    return [source, above]


def _equal(first: Path, second: Path) -> bool:
    if not first.is_file():
        return False
    if first.name != "tokenizer_config.json":
        return first.read_bytes() == second.read_bytes()
    return _settings(first) == _settings(second)


def _settings(file: Path) -> object:
    """Return what a ``tokenizer_config.json`` says of the tokenizer, or its bytes if it is not a JSON object."""
    content = file.read_bytes()
    try:
        found = json.loads(content)
    except ValueError:
        return content
    if not isinstance(found, dict):
        return content
    return {key: value for key, value in found.items() if key not in _OF_LOADING}


def side_names(source: Path) -> set[str]:
    """The names of ``side_files``, whether or not they can be copied."""
    return {name for folder in _folders(source) for name in _names(folder)}


def _names(source: Path) -> Iterator[str]:
    for entry in source.iterdir():
        if entry.name in _FOLDERS and entry.is_dir():
            folder = resolve_inside(source, entry.name)
            yield from (f"{entry.name}/{each.name}" for each in folder.iterdir() if not each.is_dir())
        elif not (entry.is_dir() or _is_other(entry.name)):
            yield entry.name


def _is_other(name: str) -> bool:
    if name == _SPEAKERS:
        return False
    return (
        name in _WRITTEN | _MEGATRON | RUN_FILES or name.startswith(".") or name.endswith((*_WEIGHTS, *_DATA))
    )


def _is_left(entry: Path) -> bool:
    """Return whether a folder or file is left behind that may look like a part of the model."""
    if entry.is_dir():
        of_a_run = re.fullmatch(r"hf|checkpoint-\d+", entry.name)
        known = entry.name.startswith((".", "iter_")) or entry.name in (*_FOLDERS, *_MEGATRON_FOLDERS)
        return not (known or of_a_run)
    return entry.name not in RUN_FILES and entry.name.endswith(_DATA)


def _checked(source: Path, name: str) -> Path:
    file = resolve_inside(source, name)
    with naming_read_errors(file):
        try:
            close(open_regular(file))
        except FileNotFoundError:
            raise McaError(
                f"{file}: a link to nothing; put the file itself there, or remove the link"
            ) from None
    return file


def copy_side_files(source: Path, target: Path) -> dict[str, int]:
    """Copy and syncs those whose names ``target`` does not have yet; returns their sizes by name."""
    for folder in _folders(source):
        others = [entry.name for entry in folder.iterdir() if _is_left(entry)]
        if others:
            words = "%s: not copied, because these folders and data sets are not part of the model: %s"
            logger.info(words, folder, ", ".join(sorted(others)))
    files = _by_name(source).items()
    return {name: _copy(file, target / name) for name, file in files if not (target / name).exists()}


def _copy(file: Path, target: Path) -> int:
    """Copy a file with its permissions, as far as the umask leaves them; returns its size."""
    with naming_read_errors(file), os.fdopen(open_regular(file), "rb") as source:
        return write_file(target, _blocks(source, file), os.fstat(source.fileno()).st_mode & 0o777 | 0o600)


def _blocks(source: BinaryIO, file: Path) -> Iterator[bytes]:
    with naming_read_errors(file):
        while data := source.read(_BUFFER_BYTES):
            yield data


_RECOGNISED = {
    "config.json": "model_type",
    "mca_config.json": "mca_version",
    "adapter_config.json": "peft_type",
}
"""Files that identify a checkpoint directory, and the key that they must have."""

_FILES = re.compile(
    "|".join(
        (
            r"(config|generation_config|mca_config|adapter_config)\.json|latest_checkpointed_iteration\.txt",
            r"(adapter_model|(pytorch_)?model(-\d+-of-\d+)?)\.(safetensors|bin)(\.index\.json)?",
            r"iter_\d+/(manifest\.json|pp_\d+/(tp_\d+|ep_\d+_etp_\d+)\.safetensors)",
            r"(tokenizer(_config)?|special_tokens_map|added_tokens|vocab|tekken|normalizer)\.json",
            r"(vocab|merges)\.txt|(tokenizer|spiece|sentencepiece\.bpe|vocab)\.model|\w+\.tiktoken",
            r"chat_template\.(jinja|json)|additional_chat_templates/[^/]+\.jinja|\w*processor_config\.json",
            r"(configuration|modeling|modular|tokenization|(\w+_)?processing)_\w+\.py",
            r"README\.md|(LICEN[CS]E|NOTICE|USE_POLICY)(\.\w+)?|\.gitattributes",
        )
    )
)
_CHECKPOINT_FOLDERS = re.compile(r"iter_\d+(/pp_\d+)?|additional_chat_templates")


def is_checkpoint(directory: Path) -> bool:
    """Return whether ``directory`` says of itself that it holds a model or an adapter."""
    return any(_has_key(directory, file, key) for file, key in _RECOGNISED.items())


def _has_key(directory: Path, file: str, key: str) -> bool:
    try:
        return key in read_json(resolve_inside(directory, file))
    except McaError:
        return False


def foreign_entry(directory: Path, more: Collection[str] = ()) -> str | None:
    """The first entry of ``directory`` that is no part of a checkpoint; None if all are.

    Args:
        directory: A checkpoint's.
        more: Names of further files that are no loss.

    Returns:
        Its name relative to ``directory``; that of a folder ends in a slash.
    """
    left = {folder.name for folder in staging_folders(directory, directory.resolve().name)}
    return _foreign(directory, "", more, left)


def _foreign(directory: Path, below: str, more: Collection[str], left: Collection[str]) -> str | None:
    for entry in sorted(directory.iterdir()):
        name = below + entry.name
        if entry.is_symlink() or not entry.is_dir():
            if _FILES.fullmatch(name) is None and name not in more:
                return name
        elif name not in left:
            if _CHECKPOINT_FOLDERS.fullmatch(name) is None:
                return f"{name}/"
            if found := _foreign(entry, f"{name}/", more, left):
                return found
    return None
