"""Tokenization of preference pairs: a prompt with a chosen and a rejected answer.

`losses.preference` computes their loss.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from mca_config.errors import McaError
from mca_config.types import Values
from mca_train.config.arguments import PairArguments
from mca_train.data.chat import Message
from mca_train.data.encoding import (
    AnswersTokenizer,
    Encoded,
    RowEncoder,
    check_messages,
    template_inputs,
    tokenize_answers,
)
from mca_train.data.formats import row_converter
from mca_train.data.token_dataset import Sample, TokenDataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TextOrMessages = str | list[Message]
"""Prompt or answer, as text or as chat messages."""


class PairDataset(Dataset[Sample]):
    """Dataset of preference pairs; an item has ``chosen_*`` and ``rejected_*`` ``input_ids`` and ``labels``.

    Args:
        sequences: Chosen and rejected sequences in turn.
    """

    def __init__(self, sequences: TokenDataset) -> None:
        self.sequences = sequences

    def __len__(self) -> int:
        return len(self.sequences) // 2

    @property
    def order_description(self) -> str:
        """Description of the order of the pairs; empty: unknown."""
        return self.sequences.order_description

    @order_description.setter
    def order_description(self, words: str) -> None:
        self.sequences.order_description = words

    @property
    def has_images(self) -> bool:
        """True if any sample has images."""
        return self.sequences.has_images

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of chosen and rejected sequences: ``[pairs, 2]``."""
        return self.sequences.lengths.reshape(-1, 2)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        sides = {"chosen": self.sequences[2 * index], "rejected": self.sequences[2 * index + 1]}
        return {f"{side}_{name}": values for side, item in sides.items() for name, values in item.items()}


def pair_encoder(
    names: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    arguments: PairArguments,
    key: str,
    tokenize: AnswersTokenizer = tokenize_answers,
) -> RowEncoder:
    """Return the encoder of rows with a chosen and a rejected answer, in this order."""
    if (other := row_converter(names, arguments, key, pairs=True)) is not None:
        inner = pair_encoder(other.names, tokenizer, replace(arguments, data_format=None), key, tokenize)
        return lambda row: inner(other.convert(row))

    def encode(row: Values) -> list[Encoded]:
        prompt, chosen, rejected = split_row(row, arguments)
        inputs = template_inputs(row, arguments)
        return tokenize(tokenizer, prompt, (chosen, rejected), arguments.seq_length, inputs)

    return encode


def split_row(row: Values, arguments: PairArguments) -> tuple[TextOrMessages, TextOrMessages, TextOrMessages]:
    """Split a row into prompt, chosen and rejected: three texts, or three lists of messages.

    Without a prompt, or if both conversations repeat it, the common beginning of both is the prompt.
    """
    prompt, names = row.get(arguments.prompt_column), (arguments.chosen_column, arguments.rejected_column)
    chosen, rejected = (row[name] for name in names)
    kinds = {name: "text" if isinstance(row[name], str) else "a list" for name in names}
    for name in names:
        if not isinstance(row[name], str | list):
            raise McaError(f"{name} is {row[name]!r:.80}; expected text or a list of messages")
    if len(set(kinds.values())) > 1:
        raise McaError(
            " and ".join(f"{name} is {kind}" for name, kind in kinds.items()) + "; expected the same for both"
        )
    if isinstance(chosen, str):
        if not isinstance(prompt, str):
            raise McaError(f"chosen and rejected are text, so the prompt must be too; got {prompt!r:.80}")
        return prompt, chosen, rejected
    return _split_messages(prompt, check_messages(chosen), check_messages(rejected))


def _split_messages(
    prompt: object, chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], list[Message], list[Message]]:
    """Remove the prompt from two conversations; files often have it in a separate column and in both."""
    answers = {"chosen": chosen, "rejected": rejected}
    common = 0
    while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
        common += 1
    if prompt is None:
        if not common or common == min(len(chosen), len(rejected)):
            raise McaError(
                "there is no prompt, and chosen and rejected have no common beginning; add a prompt"
            )
        return chosen[:common], chosen[common:], rejected[common:]
    turns = _turns(prompt)
    if all(conversation[: len(turns)] == turns for conversation in answers.values()):
        return turns, chosen[len(turns) :], rejected[len(turns) :]
    user_contents = [turn["content"] for turn in chosen[:common] if turn["role"] == "user"]
    if isinstance(prompt, str) and prompt.strip() in [
        conversation.strip() for conversation in user_contents if isinstance(conversation, str)
    ]:
        return chosen[:common], chosen[common:], rejected[common:]
    for name, conversation in answers.items():
        if turns[-1]["role"] == "user" and conversation[0]["role"] in ("system", "user"):
            raise McaError(
                f"{name} begins with a turn of the {conversation[0]['role']}, but does not repeat the prompt; "
                "begin it with the assistant's turn, or set prompt_column to a missing column, so that the "
                "common beginning of both is the prompt"
            )
    return turns, chosen, rejected


def _turns(prompt: object) -> list[Message]:
    """Return the prompt as messages; text is one user turn."""
    return check_messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
