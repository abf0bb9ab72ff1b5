"""What a run needs of its tokenizer: that there is one, and that its tokens have a place in what is trained.

Nothing is tokenized here, and the tokenizer itself is loaded in `inputs`.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from mca_config.errors import McaError, list_problems
from mca_config.files import read_json
from mca_config.types import JsonObject
from mca_models.hub import is_hub_id
from mca_train.config.arguments import DataArguments
from mca_train.config.run_config import Settings

_FILE = "tokenizer.json"
_BEGINNINGS = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken")
_ENDINGS = (".model", ".spm", ".tiktoken")
_ALONE = {"config.json", "generation_config.json", "mca_config.json", "latest_checkpointed_iteration.txt"}
"""What a plan fetches of a model of the Hub."""


def tokenizer_problems(data: DataArguments) -> Iterator[str]:
    """What keeps the tokenizer from being loaded, as far as the names of files and ``tokenizer.json`` show it."""
    folder = _folder(data)
    if not folder.is_dir():
        if data.tokenizer_name_or_path is not None and not is_hub_id(folder):
            yield f"tokenizer_name_or_path: directory {folder} does not exist"
        return  # an id stands there in plans; a model's directory is told of with the architecture
    names = {entry.name for entry in folder.iterdir()}
    if data.tokenizer_name_or_path is None and names <= _ALONE:
        return
    if not any(name.startswith(_BEGINNINGS) or name.endswith(_ENDINGS) for name in names):
        yield f"no tokenizer in {folder} (set tokenizer_name_or_path)"
    try:
        _count(folder)
    except McaError as error:
        yield from list_problems(error)


def vocabulary_problems(settings: Settings, rows: int) -> Iterator[str]:
    """Why an adapter cannot learn the tokens, of a model whose vocabulary has ``rows``."""
    try:
        tokens = _count(_folder(settings.data)) if settings.lora.wanted else None
    except McaError:
        return  # which `tokenizer_problems` tells
    if tokens is not None and (told := growth_problem(settings, tokens, rows)):
        yield told


def growth_problem(settings: Settings, tokens: int, rows: int) -> str | None:
    """What stands against a vocabulary of ``rows`` that grows to as many as the tokenizer has ``tokens``."""
    if tokens <= rows or not settings.lora.wanted:
        return None
    path = settings.data.model_name_or_path
    return (
        f"the tokenizer has {tokens} tokens, the model's vocabulary {rows}, and an adapter does not hold the new "
        f"rows; write a larger base model first: AutoModel.from_pretrained({path!r}, vocab_size={tokens})"
        ".save_pretrained_as_hf(...)"
    )


def _folder(data: DataArguments) -> Path:
    return Path(data.tokenizer_name_or_path or data.model_name_or_path)


def _count(folder: Path) -> int | None:
    """The tokens of ``tokenizer.json`` in ``folder``; None: there is none, or of a form that is not known here.

    Raises:
        McaError: The file is no JSON document.
    """
    file = folder / _FILE
    return _count_tokens(file, file.stat().st_mtime_ns) if file.is_file() else None


@cache
def _count_tokens(file: Path, changed: int) -> int | None:
    """The same, once for each time that the file has ``changed``: a search of layouts asks often."""
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
