"""``mca-train tokenize``: writes the texts of a configuration as a Megatron indexed dataset."""

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from mca_config.errors import McaError, UsageError, raise_problems, raising_usage_errors
from mca_config.printable import counted
from mca_config.types import Values
from mca_train.config.model import model_config
from mca_train.config.run_config import Settings, with_directories
from mca_train.data.encoding import block_tokenizer
from mca_train.data.indexed import write_indexed
from mca_train.data.streams import open_rows
from mca_train.run.file_rules import data_files
from mca_train.run.inputs import load_tokenizer
from mca_train.run.logs import quiet_libraries
from mca_train.run.settings import make_settings
from mca_train.tasks.table import TASKS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FLAG = "output_prefix"
_ROWS_AT_ONCE = 256


def tokenize(values: Values, where: str, output_prefix: str | None) -> int:
    """Tokenize ``train_file``, each row a document that ends with the end-of-sequence token.

    Args:
        values: Keys and values of a pre-training run.
        where: Their origin for error messages.
        output_prefix: Of the dataset's two files; None: the configuration has it.
    """
    quiet_libraries(first=True)
    prefix = values.get(_FLAG) if output_prefix is None else output_prefix
    values = {key: value for key, value in values.items() if key != _FLAG}
    if not isinstance(prefix, str):
        raise UsageError(
            "mca-train tokenize needs --output_prefix: <prefix>.bin and <prefix>.idx are written"
        )
    task = TASKS["pretrain"]
    settings = make_settings(task, with_directories(values, only="tokenizer"), where)
    raise_problems(data_files(task, settings), where, kind=UsageError)
    if settings.data.datasets:
        raise UsageError(f"{where}: mca-train tokenize reads train_file, not datasets; set train_file")
    with raising_usage_errors():
        tokenizer = load_tokenizer(settings)

    count, tokens = write_indexed(Path(prefix), _documents(settings, tokenizer), len(tokenizer))
    sys.stdout.write(
        f"wrote {prefix}.bin and {prefix}.idx: {counted(count, 'document')}, {counted(tokens, 'token')}\n"
    )
    return 0


def _vision(model: str) -> Values | None:
    """Return the vision fields of the configuration of ``model``; None: it has none, or cannot be read."""
    try:
        return model_config(model).vision_fields
    except McaError:  # a directory of a tokenizer alone, or a model that only Megatron trains
        return None


def _documents(settings: Settings, tokenizer: "PreTrainedTokenizerBase") -> Iterator[Sequence[int]]:
    """Yield the tokens of each row."""
    data, key = settings.data, "train_file"
    vision = _vision(data.model_name_or_path)
    rows, names = open_rows(data.train_file, key, data, data.text_column, seed=None, vision=vision)
    tokens_of = block_tokenizer(names, tokenizer, data, key, vision)
    left = iter(rows)
    while some := list(islice(left, _ROWS_AT_ONCE)):
        yield from tokens_of(some, [row.place for row in some])
