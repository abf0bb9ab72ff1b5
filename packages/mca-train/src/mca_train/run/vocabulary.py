"""Checks of the tokenizer's files and of its vocabulary size; `inputs` loads the tokenizer."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from mca_config.errors import McaError, raised_problems
from mca_config.files import read_json
from mca_config.types import JsonObject
from mca_models.hub import is_hub_id
from mca_train.config.arguments import DataArguments
from mca_train.config.run_config import Settings

_FILE = "tokenizer.json"
_BEGINNINGS = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken")
_ENDINGS = (".model", ".spm", ".tiktoken")
_ALONE = {"config.json", "generation_config.json", "mca_config.json", "latest_checkpointed_iteration.txt"}
"""Files of a Hub model that a plan downloads."""


def tokenizer_problems(data: DataArguments) -> Iterator[str]:
    """Yield problems of the tokenizer that file names and ``tokenizer.json`` show."""
    folder = _folder(data)
    if not folder.is_dir():
        if data.tokenizer_name_or_path is not None and not is_hub_id(folder):
            yield f"tokenizer_name_or_path: directory {folder} does not exist"
        return  # a Hub id in plans; a missing model directory is reported with the architecture
    names = {entry.name for entry in folder.iterdir()}
    if data.tokenizer_name_or_path is None and names <= _ALONE:
        return
    if not any(name.startswith(_BEGINNINGS) or name.endswith(_ENDINGS) for name in names):
        yield f"no tokenizer in {folder} (set tokenizer_name_or_path)"
    yield from raised_problems(_count, folder)


def vocabulary_problems(settings: Settings, rows: int) -> Iterator[str]:
    """Report tokens beyond the model's ``rows`` vocabulary rows, which an adapter cannot train."""
    try:
        tokens = _count(_folder(settings.data)) if settings.lora.is_enabled else None
    except McaError:
        return  # reported by `tokenizer_problems`
    if tokens is not None and (problem := growth_problem(settings, tokens, rows)):
        yield problem


def growth_problem(settings: Settings, tokens: int, rows: int) -> str | None:
    """Return the problem of extending a vocabulary of ``rows`` to the tokenizer's ``tokens``; None: there is none."""
    if tokens <= rows or not settings.lora.is_enabled:
        return None
    path = settings.data.model_name_or_path
    return (
        f"the tokenizer has {tokens} tokens, the model's vocabulary {rows}, and an adapter does not contain the new "
        f"rows; write a larger base model first: AutoModel.from_pretrained({path!r}, vocab_size={tokens})"
        ".save_pretrained_as_hf(...)"
    )


def _folder(data: DataArguments) -> Path:
    return Path(data.tokenizer_name_or_path or data.model_name_or_path)


def _count(folder: Path) -> int | None:
    """Return the number of tokens in ``tokenizer.json`` of ``folder``; None: no such file, or an unknown format.

    Raises:
        McaError: The file is not valid JSON.
    """
    file = folder / _FILE
    return _count_tokens(file, file.stat().st_mtime_ns) if file.is_file() else None


@cache
def _count_tokens(file: Path, changed: int) -> int | None:
    """Return the number of tokens, cached by the file's time of change because a layout search needs it often."""
    document = read_json(file, "a tokenizer")
    vocabulary = (document.get("model") or {}).get("vocab")
    added = document.get("added_tokens") or []
    if isinstance(vocabulary, dict):
        names = set(vocabulary)
    elif isinstance(vocabulary, list) and all(isinstance(piece, list) and piece for piece in vocabulary):
        names = {piece[0] for piece in vocabulary}
    else:
        return None
    return len(names | set(map(_content, added)))


def _content(added: JsonObject) -> str:
    return str(added.get("content"))
