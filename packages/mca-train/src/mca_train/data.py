"""Files to tokenized samples: JSONL, JSON, parquet, Arrow and text, for pre-training and for fine-tuning."""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mca_config.errors import McaError, UsageError
from mca_train.arguments import DataArguments
from mca_train.chat import Tools, tokenize_chat
from mca_train.token_dataset import TokenDataset

logger = logging.getLogger(__name__)

Kind = Literal["pretrain", "sft", "dpo"]
_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow", ".txt": "text"}


def load_rows(
    files: Sequence[str],
    key: str,
    arguments: DataArguments,
    limit: int | None = None,
    column: str | None = None,
) -> Any:
    """The rows of ``files``, as a ``datasets.Dataset``, with the columns that samples are made of.

    A ``.txt`` file is one row; the others have a row per record.

    Args:
        files: Paths.
        key: The argument that named them, for errors.
        arguments: Which columns these are.
        limit: Rows to keep; None: all.
        column: Every file must have it; None: they may differ.

    Raises:
        McaError: A file is missing, of another type, not readable as its type, or without the column; or there
            are no rows.
    """
    import datasets

    datasets.disable_progress_bars()
    parts = [_load_file(Path(file), key) for file in files]
    if not any(map(len, parts)):
        raise McaError(f"{key}: {', '.join(files)} has no rows")
    for file, part in zip(files, parts, strict=True):
        require_column(part.column_names, column, f"{key}: {file}")
    rows = joined(parts, files, key, arguments)
    return rows if limit is None else rows.select(range(min(limit, len(rows))))


def column_names(arguments: DataArguments) -> set[str]:
    """The columns that samples may be made of."""
    return {value for name, value in vars(arguments).items() if name.endswith("_column")}


def joined(parts: Sequence[Any], files: Sequence[str], key: str, arguments: DataArguments) -> Any:
    """``parts`` one after another, with the columns that samples are made of: others may differ in type.

    Args:
        parts: ``datasets``' of ``files``, in memory or not.
        files: Paths.
        key: The argument that named them, for errors.
        arguments: Which columns these are.

    Raises:
        McaError: A column is of one type in one file and of another in another.
    """
    import datasets

    if len(parts) == 1:
        return parts[0]
    wanted = column_names(arguments)
    kept = [[name for name in part.column_names or () if name in wanted] for part in parts]
    parts = [part.select_columns(names) if names else part for part, names in zip(parts, kept, strict=True)]
    try:
        return datasets.concatenate_datasets(list(parts))
    except (ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise McaError(
            f"{key}: the columns of {', '.join(files)} do not go together: {reason[:300]}"
        ) from error


def require_column(names: Sequence[str], column: str | None, where: str) -> None:
    """Refuses a file whose rows would contribute nothing, as they do not have the ``column`` with text."""
    if column is not None and names and column not in names:
        raise UsageError(f"{where}: no column '{column}' (columns: {', '.join(names)}); set text_column")


def check_file(path: Path, key: str) -> tuple[str, dict[str, Any]]:
    """The reader of ``datasets`` for ``path``, and its options.

    Raises:
        McaError: The file is missing, empty, or of another type.
    """
    if path.is_dir():
        raise McaError(f"{key}: {path} is a directory; name its files")
    if not path.is_file():
        raise McaError(f"{key}: file {path} does not exist")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise McaError(f"{key}: {path} ends in '{path.suffix}'; expected one of {', '.join(_READERS)}")
    if path.stat().st_size == 0:
        raise McaError(f"{key}: {path} is empty")
    return reader, {"sample_by": "document"} if reader == "text" else {}


def _load_file(path: Path, key: str) -> Any:
    import datasets

    reader, options = check_file(path, key)
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it tells of files that cannot be read, twice
    try:
        return datasets.load_dataset(reader, data_files=str(path), split="train", **options)
    except (datasets.exceptions.DatasetGenerationError, ValueError, TypeError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        if "corresponds to no data" in reason:
            raise McaError(f"{key}: {path} has no rows") from error
        raise McaError(f"{key}: {path} cannot be read as {reader}: {reason[:200]}") from error


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
    tokenized = rows.map(
        lambda batch, indices: {"input_ids": tokenize([{column: text} for text in batch[column]], indices)},
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
) -> Callable[[list[Any], Sequence[int]], list[list[int]]]:
    """The function from rows and their numbers to the tokens of each text, EOS last; rows without text have none."""
    column = arguments.text_column
    require_column(names, column, key)
    eos = _eos(tokenizer)

    def tokenize(rows: list[Any], numbers: Sequence[int]) -> list[list[int]]:
        for row, number in zip(rows, numbers, strict=True):
            if not isinstance(row[column], str | None):
                raise McaError(f"{key}, row {number}: {column} is {row[column]!r:.80}; expected text")
        texts = [row[column] for row in rows if row[column]]
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
            tokenizer, check_messages(row[arguments.messages_column]), tools=tools_of(row, arguments)
        )
    if {arguments.prompt_column, arguments.completion_column} <= set(names):
        return lambda row: tokenize_answer(
            tokenizer,
            row[arguments.prompt_column],
            row[arguments.completion_column],
            tools_of(row, arguments),
        )
    if (column := arguments.text_column) in names:
        return lambda row: tokenize_answer(tokenizer, "", require_text(row[column], column))
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
    tokenizer: Any, prompt: Any, completion: Any, tools: Tools | None = None
) -> tuple[list[int], list[bool]]:
    """Prompt and answer as text, or as two lists of chat messages; the answer ends with EOS."""
    if isinstance(prompt, list):
        if not isinstance(completion, list):
            raise McaError(
                f"the prompt is a list of messages, so the completion must be; got {completion!r:.80}"
            )
        turns = check_messages([*prompt, *completion])
        return tokenize_chat(tokenizer, turns, first=len(prompt), tools=tools)
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise McaError(f"prompt and completion must be text; got {prompt!r} and {completion!r}")
    context = tokenizer(prompt, verbose=False)["input_ids"] if prompt else []
    eos = tokenizer.eos_token_id
    if context and context[-1] == eos:  # a tokenizer that ends what it encodes: the prompt is not the end
        context = context[:-1]
    answer = tokenizer(completion, add_special_tokens=not prompt, verbose=False)["input_ids"]
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
