"""Names of files that a conversion or a Hugging Face export writes, which tell checkpoint directories from others.

They decide what may be replaced: a directory with any other file is kept.
"""

import re
from collections.abc import Collection
from pathlib import Path

from mca_config.errors import McaError
from mca_config.files import read_json, resolve_inside
from mca_models.storage.staging_folder import staging_folders

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
_FOLDERS = re.compile(r"iter_\d+(/pp_\d+)?|additional_chat_templates")


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
            if _FOLDERS.fullmatch(name) is None:
                return f"{name}/"
            if found := _foreign(entry, f"{name}/", more, left):
                return found
    return None
