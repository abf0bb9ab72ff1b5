"""The samples of a kind of run from its files."""

from collections.abc import Sequence
from typing import Any, Literal

from mca_train.config.arguments import DataArguments
from mca_train.data.files import load_rows, named
from mca_train.data.samples import pretrain_blocks, sft_samples

Kind = Literal["pretrain", "sft", "dpo"]


def load_tokenized(
    kind: Kind, files: Sequence[str], tokenizer: Any, arguments: DataArguments, *, evaluation: bool = False
) -> Any:
    """The samples of ``files``, tokenized: a `TokenDataset`, or a `PairDataset` for ``dpo``.

    Args:
        kind: ``pretrain`` cuts all text into blocks; ``sft`` makes a sample of each row, ``dpo`` a pair.
        files: Paths.
        tokenizer: Hugging Face tokenizer.
        arguments: Columns, lengths and limits.
        evaluation: Whether these are the evaluation files.
    """
    key = "eval_file" if evaluation else "train_file"
    limit = arguments.max_eval_samples if evaluation else arguments.max_train_samples
    rows = load_rows(files, key, arguments, limit, arguments.text_column if kind == "pretrain" else None)
    with named(
        key, ", ".join(files), "text", UnicodeDecodeError
    ):  # parquet's is decoded when it is looked at
        if kind == "pretrain":
            return pretrain_blocks(rows, tokenizer, arguments, key)
        if kind == "dpo":
            from mca_train.data.preferences import preference_pairs

            return preference_pairs(rows, tokenizer, arguments, key)
        return sft_samples(rows, tokenizer, arguments, key)
