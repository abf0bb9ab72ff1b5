"""Files to tokenized samples: JSONL, JSON, parquet, Arrow and text, for pre-training and for fine-tuning."""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mca_config.errors import McaError, UsageError
from mca_train.arguments import DataArguments
from mca_train.chat import Tools, tokenize_chat
from mca_train.long_texts import LONG, all_ids, head_encoding
from mca_train.reading import load_rows, named, require_column
from mca_train.token_dataset import TokenDataset

logger = logging.getLogger(__name__)

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
            from mca_train.preferences import preference_pairs

            return preference_pairs(rows, tokenizer, arguments, key)
        return sft_samples(rows, tokenizer, arguments, key)


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


def block_tokenizer(
    names: Sequence[str], tokenizer: Any, arguments: DataArguments, key: str
) -> Callable[[list[Any], Sequence[str]], list[list[int]]]:
    """The function from rows and their places to the tokens of each text, EOS last; rows without text have none."""
    column = arguments.text_column
    require_column(names, column, key)
    eos = _eos(tokenizer)

    def tokenize(rows: list[Any], places: Sequence[str]) -> list[list[int]]:
        for row, place in zip(rows, places, strict=True):
            if not isinstance(row[column], str | None):
                raise McaError(f"{key}, {place}: {column} is {row[column]!r:.80}; expected text")
        texts = [row[column] for row in rows if row[column]]
        if max(map(len, texts), default=0) > LONG:
            return [[*all_ids(tokenizer, text), eos] for text in texts]
        ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        return [[*tokens, eos] for tokens in ids]

    return tokenize


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
    tell_cut(tokenized["is_cut"], length, key)
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


def tell_cut(is_cut: Iterable[bool], length: int, key: str) -> None:
    """Says how many rows did not fit whole."""
    cut = list(is_cut)
    if any(cut):
        logger.warning(
            "%s: %d of %d rows are longer than seq_length %d and are cut at the end",
            key,
            sum(cut),
            len(cut),
            length,
        )


def row_encoder(names: Sequence[str], tokenizer: Any, arguments: DataArguments, key: str) -> Any:
    """The function from a row to ``(tokens, is_target)``, by the columns that the rows have."""
    if arguments.messages_column in names:
        return lambda row: tokenize_chat(
            tokenizer,
            check_messages(row[arguments.messages_column]),
            tools=tools_of(row, arguments),
            length=arguments.seq_length,
        )
    if {arguments.prompt_column, arguments.completion_column} <= set(names):
        return lambda row: tokenize_answer(
            tokenizer,
            row[arguments.prompt_column],
            row[arguments.completion_column],
            arguments.seq_length,
            tools_of(row, arguments),
        )
    if (column := arguments.text_column) in names:
        return lambda row: tokenize_answer(
            tokenizer, "", require_text(row[column], column), arguments.seq_length
        )
    raise UsageError(
        f"{key}: columns {', '.join(names)}; expected '{arguments.messages_column}', "
        f"'{arguments.prompt_column}' with '{arguments.completion_column}', or '{arguments.text_column}' "
        "(set messages_column, prompt_column, completion_column or text_column)"
    )


def tools_of(row: dict[str, Any], arguments: DataArguments) -> Tools | None:
    """What a row says of tools: a list of mappings, or that as JSON text; None: nothing."""
    column = arguments.tools_column
    found = row.get(column)
    if isinstance(found, str) and found:
        try:
            found = json.loads(found)
        except json.JSONDecodeError as error:
            raise McaError(f"{column} is not valid JSON: {error}") from None
    if not found:
        return None
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise McaError(f"{column} is {found!r:.80}; expected a list of mappings, or that as JSON text")
    return [_without_nulls(tool) for tool in found]


def _without_nulls(value: Any) -> Any:
    """Without the keys that only other rows of the file have, which is what columns make of mappings."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def tokenize_answer(
    tokenizer: Any, prompt: Any, completion: Any, length: int, tools: Tools | None = None
) -> tuple[list[int], list[bool]]:
    """Prompt and answer as text, or as two lists of chat messages; the answer ends with EOS.

    Of what is much longer than ``length`` tokens, no more than those must be right.
    """
    if isinstance(prompt, list):
        if not isinstance(completion, list):
            raise McaError(
                f"the prompt is a list of messages, so the completion must be; got {completion!r:.80}"
            )
        turns = check_messages([*prompt, *completion])
        return tokenize_chat(tokenizer, turns, first=len(prompt), tools=tools, length=length)
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise McaError(f"prompt and completion must be text; got {prompt!r} and {completion!r}")
    context = head_encoding(tokenizer, prompt, length)["input_ids"] if prompt else []
    eos = tokenizer.eos_token_id
    if context and context[-1] == eos:  # a tokenizer that ends what it encodes: the prompt is not the end
        context = context[:-1]
    answer = head_encoding(tokenizer, completion, length, add_special_tokens=not prompt)["input_ids"]
    if not answer or answer[-1] != eos:
        answer = [*answer, _eos(tokenizer)]
    return [*context, *answer], [False] * len(context) + [True] * len(answer)


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """``messages`` with the keys that are not set left out.

    Raises:
        McaError: Not a list of messages with a role and content (or, of an assistant, anything else to say).
    """
    if not isinstance(messages, list) or not messages:
        raise McaError(f"messages must be a list of turns; got {messages!r:.80}")
    for turn, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise McaError(f"messages, turn {turn}: expected a mapping with 'role' and 'content'")
        _require_said(turn, message)
    return [_without_nulls(message) for message in messages]


def _require_said(turn: int, message: dict[str, Any]) -> None:
    content, role = message.get("content"), message["role"]
    if not isinstance(content, str | list | None):
        raise McaError(f"messages, turn {turn} ({role}): content is {content!r:.80}; expected text")
    others = [value for key, value in message.items() if key not in ("role", "name", "content")]
    if content is None and not (role == "assistant" and any(others)):
        wanted = "content or tool_calls" if role == "assistant" else "content"
        raise McaError(f"messages, turn {turn} ({role}): no {wanted}; give it, or leave the row out")


def require_text(value: Any, column: str) -> str:
    """``value`` of ``column``, which must be text."""
    if not isinstance(value, str):
        raise McaError(f"{column} is {value!r:.80}; expected text")
    return value


def _eos(tokenizer: Any) -> int:
    if tokenizer.eos_token_id is None:
        raise McaError("the tokenizer has no end-of-sequence token; set `eos_token` in its directory")
    return int(tokenizer.eos_token_id)
