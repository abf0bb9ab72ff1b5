"""Checks that a streamed row has a target, without tokenizing it.

Every rank must know for every row whether it has a target, but tokenization is slow. So a row is not tokenized if its
text is short enough that its answer must fit. `streams` tokenizes the others.
"""

import unicodedata
from collections.abc import Callable
from typing import TYPE_CHECKING

from mca_config.types import Values
from mca_train.config.arguments import DataArguments, PairArguments
from mca_train.data.chat import has_generation_marks
from mca_train.data.formats import COLUMNS, TEMPLATE_INPUTS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXT_OVERHEAD = 64  # tokens that a tokenizer may add to a text

_CONVERSATION_OVERHEAD, _TURN_OVERHEAD = 1024, 128  # characters that a chat template may add to either


def sft_target_check(
    tokenizer: "PreTrainedTokenizerBase", arguments: DataArguments
) -> Callable[[Values], bool]:
    """Return a predicate of SFT rows that certainly have a target, without tokenization.

    It assumes at most two tokens per byte, and at most a thousand characters added by a template.
    """
    marked = has_generation_marks(tokenizer)
    length = arguments.seq_length

    def is_sure(row: Values) -> bool:
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


def pair_target_check(arguments: PairArguments) -> Callable[[Values], bool]:
    """Return a predicate of preference pairs that certainly have targets in both answers."""
    names = (arguments.prompt_column, arguments.chosen_column, arguments.rejected_column)

    def is_sure(row: Values) -> bool:
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
