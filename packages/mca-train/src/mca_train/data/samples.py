"""All rows of the files as samples in memory, for pre-training and for fine-tuning."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mca_config.errors import McaError
from mca_train.config.arguments import DataArguments
from mca_train.data.encoding import block_tokenizer, row_encoder, warn_truncated
from mca_train.data.token_dataset import TokenDataset

logger = logging.getLogger(__name__)


def pretrain_blocks(rows: Any, tokenizer: Any, arguments: DataArguments, key: str) -> TokenDataset:
    """All texts one after another, each ended by EOS, cut into blocks of ``seq_length`` tokens.

    Rows without text are counted.
    """
    import datasets

    tokenize = block_tokenizer(rows.column_names, tokenizer, arguments, key)
    column = arguments.text_column

    def tokenize_batch(batch: Any, indices: Sequence[int]) -> dict[str, Any]:
        places = [f"row {index}" for index in indices]
        return {"input_ids": tokenize([{column: text} for text in batch[column]], places)}

    tokenized = rows.map(
        tokenize_batch,
        batched=True,
        with_indices=True,
        remove_columns=rows.column_names,
        num_proc=arguments.preprocessing_num_workers,
        keep_in_memory=True,
        features=datasets.Features({"input_ids": datasets.Sequence(datasets.Value("int32"))}),
    )
    if empty := len(rows) - len(tokenized):
        told = f"{key}: {empty} of {len(rows)} rows have no text in column '{column}'"
        if empty == len(rows):
            raise McaError(f"{told}; set text_column")
        logger.warning("%s and are left out", told)
    blocks = TokenDataset.in_blocks(_flatten(tokenized), arguments.seq_length)
    if not len(blocks):
        raise McaError(f"{key}: the texts have fewer than two tokens together")
    return blocks


def _flatten(tokenized: Any) -> NDArray[np.int32]:
    """Column ``input_ids`` as one array, without passing through Python lists."""
    chunks = tokenized.data.column("input_ids").chunks
    parts = [chunk.flatten().to_numpy(zero_copy_only=False).astype(np.int32) for chunk in chunks]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def sft_samples(rows: Any, tokenizer: Any, arguments: DataArguments, key: str) -> TokenDataset:
    """A sample of each row; only answers are targets. Rows without a target left are dropped and counted."""
    encode = row_encoder(rows.column_names, tokenizer, arguments, key)
    length = arguments.seq_length

    def tokenize(row: dict[str, Any], index: int) -> dict[str, Any]:
        try:
            tokens, targets = encode(row)
        except McaError as error:
            raise McaError(f"{key}, row {index}: {error}") from error
        return {
            "input_ids": tokens[:length],
            "is_target": targets[:length],
            "is_cut": len(tokens) > length,
        }

    tokenized = rows.map(
        tokenize,
        with_indices=True,
        remove_columns=rows.column_names,
        num_proc=arguments.preprocessing_num_workers,
        keep_in_memory=True,
    )
    warn_truncated(tokenized["is_cut"], length, key)
    columns = zip(tokenized["input_ids"], tokenized["is_target"], strict=True)
    samples = [(tokens, targets) for tokens, targets in columns if any(targets[1:])]
    if not samples:
        raise McaError(f"{key}: no row has an answer within seq_length {length}")
    if len(samples) < len(tokenized):
        logger.warning(
            "%s: %d of %d rows have no answer within seq_length %d and are left out",
            key,
            len(tokenized) - len(samples),
            len(tokenized),
            length,
        )
    return TokenDataset.from_samples(samples)
