"""Filter of streamed rows without a target, identical on all ranks.

Every rank must know for every row whether it has a target, but tokenization is slow. So a row is not tokenized if its
text is short enough that its answer must fit. `samples` drops in-memory rows instead.
"""

import logging
import unicodedata
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mca_config.errors import McaError
from mca_config.printable import counted
from mca_config.types import Values
from mca_train.config.arguments import DataArguments, PairArguments
from mca_train.data.chat import has_generation_marks
from mca_train.data.file_rows import FileRows, Row
from mca_train.data.formats import COLUMNS, TEMPLATE_INPUTS
from mca_train.data.token_dataset import IGNORED, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_TEXT_OVERHEAD = 64  # tokens that a tokenizer may add to a text

_CONVERSATION_OVERHEAD, _TURN_OVERHEAD = (
    1024,
    128,
)  # characters that a chat template may add per conversation and per turn


class SampleBuilder:
    """Builder of samples that keeps the last one, because the filter and the loader may need the same sample.

    Args:
        encode: Function from a row to its sample.
        key: Argument that names the files, for errors.
    """

    def __init__(self, encode: Callable[[Values], Sample], key: str) -> None:
        self._encode, self._key = encode, key
        self._last: tuple[Values, Sample] | None = None

    def __call__(self, row: Values) -> Sample:
        """Return the sample of ``row``.

        Raises:
            McaError: The row is invalid; the message names it.
        """
        if self._last is not None and self._last[0] is row:
            return self._last[1]
        try:
            sample = self._encode(row)
        except McaError as error:
            place = getattr(row, "place", "")
            raise McaError(f"{self._key}{place and ', ' + place}: {error}") from error
        self._last = row, sample
        return sample


class RowsWithTargets:
    """Rows from which a sample with a target can be built.

    Args:
        rows: All rows.
        make: Function from a row to its sample.
        is_sure: Function that returns True if a row has a target for sure, without building its sample.
        warning: Warning about rows without a target.
    """

    def __init__(
        self, rows: FileRows, make: Callable[[Row], Sample], is_sure: Callable[[Row], bool], warning: str
    ) -> None:
        self._rows, self._make, self._is_sure, self._warning = rows, make, is_sure, warning
        self._has_warned = False

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the shuffle."""
        self._rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[Row]:
        kept = total = 0
        for row in self._rows:
            total += 1
            if self._is_sure(row) or has_target(self._make(row)):
                kept += 1
                yield row
        if total and not kept:
            raise McaError(f"{self._warning}: all {counted(total, 'row')}")
        if kept < total and not self._has_warned:
            logger.warning(
                "%s and are left out: %d of %s", self._warning, total - kept, counted(total, "row")
            )
            self._has_warned = True


def has_target(sample: Sample) -> bool:
    """Return True if every sequence has a target after its first token."""
    return all(
        bool((values[1:] != IGNORED).any()) for name, values in sample.items() if name.endswith("labels")
    )


def sft_target_check(tokenizer: "PreTrainedTokenizerBase", arguments: DataArguments) -> Callable[[Row], bool]:
    """Return a predicate of SFT rows that certainly have a target, without tokenization.

    It assumes at most two tokens per byte, and at most a thousand characters added by a template.
    """
    marked = has_generation_marks(tokenizer)
    length = arguments.seq_length

    def is_sure(row: Row) -> bool:
        columns = (arguments.messages_column, arguments.completion_column, arguments.text_column)
        if arguments.data_format or COLUMNS & row.keys() or len(row.keys() & {*columns}) > 1:
            return False  # another format, or an ambiguous one
        messages, completion = row.get(arguments.messages_column), row.get(arguments.completion_column)
        if messages is not None:
            others = row.get(arguments.tools_column) or row.get(TEMPLATE_INPUTS)
            return not (marked or others) and _has_early_answer(messages, length)
        if completion is not None:
            prompt = row.get(arguments.prompt_column)
            return (
                isinstance(prompt, str) and isinstance(completion, str) and _is_shorter_than(prompt, length)
            )
        text = row.get(arguments.text_column)
        return isinstance(text, str) and any(letter.isascii() and letter.isalnum() for letter in text[:64])

    return is_sure


def pair_target_check(arguments: PairArguments) -> Callable[[Row], bool]:
    """Return a predicate of preference pairs that certainly have targets in both answers."""
    names = (arguments.prompt_column, arguments.chosen_column, arguments.rejected_column)

    def is_sure(row: Row) -> bool:
        if arguments.data_format or COLUMNS & row.keys():
            return False
        texts = [row.get(name) for name in names]
        return all(isinstance(text, str) for text in texts) and _is_shorter_than(
            str(texts[0]), arguments.seq_length
        )

    return is_sure


def _is_shorter_than(text: str, length: int, others: int = 0) -> bool:
    """Return True if ``text`` has fewer than ``length`` tokens with any tokenizer."""
    room = (length - _TEXT_OVERHEAD) // 2 - others
    return len(text) < room and len(unicodedata.normalize("NFKC", text).encode(errors="replace")) < room


def _has_early_answer(messages: object, length: int) -> bool:
    """Return True if the first answer of a conversation begins within ``length`` tokens."""
    if not isinstance(messages, list):
        return False
    previous: list[str] = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, str) or not content.strip() or message.get("weight") == 0:
            return False
        if message.get("role") == "assistant":
            return _is_shorter_than(
                "".join(previous), length, _CONVERSATION_OVERHEAD + _TURN_OVERHEAD * (len(previous) + 1)
            )
        previous.append(content)
    return False
