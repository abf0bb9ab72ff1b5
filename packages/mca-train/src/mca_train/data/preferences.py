"""Rows of a prompt with a better and a worse answer are tokenized here.

What is learnt from a pair is in `losses.preference`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from mca_config.errors import McaError
from mca_config.types import Values
from mca_train.config.columns import PairArguments
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
"""A prompt or an answer: text, or chat messages."""


class PairDataset(Dataset[Sample]):
    """Preference pairs: an item has ``input_ids`` and ``labels`` of both, as ``chosen_*`` and ``rejected_*``.

    Args:
        sequences: The chosen and the rejected one of each pair, in turn.
    """

    def __init__(self, sequences: TokenDataset) -> None:
        self.sequences = sequences

    def __len__(self) -> int:
        return len(self.sequences) // 2

    @property
    def order_description(self) -> str:
        """What decides in which order the pairs come; empty: nobody knows."""
        return self.sequences.order_description

    @order_description.setter
    def order_description(self, words: str) -> None:
        self.sequences.order_description = words

    @property
    def has_images(self) -> bool:
        """Whether any sample has."""
        return self.sequences.has_images

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of chosen and rejected: ``[pairs, 2]``."""
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
    """The encoder of rows with a chosen and a rejected answer, in this order."""
    if (other := row_converter(names, arguments, key, pairs=True)) is not None:
        inner = pair_encoder(other.names, tokenizer, replace(arguments, data_format=None), key, tokenize)
        return lambda row: inner(other.convert(row))

    def encode(row: Values) -> list[Encoded]:
        prompt, chosen, rejected = split_row(row, arguments)
        inputs = template_inputs(row, arguments)
        return tokenize(tokenizer, prompt, (chosen, rejected), arguments.seq_length, inputs)

    return encode


def split_row(row: Values, arguments: PairArguments) -> tuple[TextOrMessages, TextOrMessages, TextOrMessages]:
    """Prompt, chosen and rejected: three texts, or three lists of messages.

    Without a prompt, or with one that both conversations repeat, what they have in common at their beginning is the
    prompt.
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
    """Two answers without the prompt; files often have it in a column of its own and in both conversations."""
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
    if all(said[: len(turns)] == turns for said in answers.values()):
        return turns, chosen[len(turns) :], rejected[len(turns) :]
    asked = [turn["content"] for turn in chosen[:common] if turn["role"] == "user"]
    if isinstance(prompt, str) and prompt.strip() in [
        said.strip() for said in asked if isinstance(said, str)
    ]:
        return chosen[:common], chosen[common:], rejected[common:]
    for name, said in answers.items():
        if turns[-1]["role"] == "user" and said[0]["role"] in ("system", "user"):
            raise McaError(
                f"{name} begins with a turn of the {said[0]['role']}, but is no conversation that repeats the prompt; "
                "begin it with the assistant's turn, or name a column that is not there as prompt_column: then the "
                "common beginning of both is the prompt"
            )
    return turns, chosen, rejected


def _turns(prompt: object) -> list[Message]:
    """A prompt of messages; text is one turn of the user."""
    return check_messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
