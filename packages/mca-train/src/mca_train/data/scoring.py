"""Rows for reward models (pairs) and for classification or regression (texts with labels).

Every token is an input and none is predicted. Hugging Face's models score the last token that is not padding, so
trailing padding, such as an EOS that is also the padding token, is removed.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mca_config.errors import McaError
from mca_config.types import Typed, Values
from mca_train.config.arguments import ClassifyArguments, RewardArguments, explicit_columns
from mca_train.data.chat import TemplateInputs, chat_ids
from mca_train.data.encoding import (
    Encoded,
    RowEncoder,
    RowNumbers,
    check_messages,
    pair_encoder,
    require_text,
    template_inputs,
    tokenize_answers,
)
from mca_train.data.formats import detect_format, require_label_column, require_named_column
from mca_train.data.long_texts import TokenPrefix, encode_prefix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def padding_token(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the value of a model's ``pad_token_id``: the padding token, or EOS."""
    found: int | None = tokenizer.pad_token_id
    return tokenizer.eos_token_id if found is None else found


def _strip_padding(tokens: Sequence[int], padding: int | None) -> Encoded:
    end = len(tokens)
    while end > 1 and tokens[end - 1] == padding:
        end -= 1
    kept = list(tokens[:end])
    return TokenPrefix(kept) if isinstance(tokens, TokenPrefix) else kept, [True] * end


def scored_pair_encoder(
    names: Sequence[str], tokenizer: "PreTrainedTokenizerBase", arguments: RewardArguments, key: str
) -> RowEncoder:
    """Return the encoder of rows with a chosen and a rejected text or conversation, with an optional prompt."""
    encode = pair_encoder(names, tokenizer, arguments, key, _tokenize_whole)
    padding = padding_token(tokenizer)

    def encoder(row: Values) -> list[Encoded]:
        whole = isinstance(row[arguments.chosen_column], str) and row.get(arguments.prompt_column) is None
        prompted = {**row, arguments.prompt_column: ""} if whole else row
        return [_strip_padding(tokens, padding) for tokens, _ in encode(prompted)]

    return encoder


def _tokenize_whole(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: object,
    completions: Sequence[object],
    length: int,
    inputs: TemplateInputs,
) -> list[Encoded]:
    """Tokenize like `tokenize_answers`, but conversations as whole texts without targets."""
    if not isinstance(prompt, list):
        return tokenize_answers(tokenizer, prompt, completions, length, inputs)
    turns = [[*prompt, *answer] for answer in completions if isinstance(answer, list)]
    wholes = [chat_ids(tokenizer, check_messages(answer), inputs, length=length) for answer in turns]
    return [(tokens, [True] * len(tokens)) for tokens in wholes]


def margin_reader(names: Sequence[str], arguments: RewardArguments, key: str) -> RowNumbers | None:
    """Return the reader of margins, if rows have the column; a renamed column must exist."""
    column = arguments.margin_column
    if "margin_column" in explicit_columns(arguments):
        require_named_column("margin_column", names, arguments, key)
    return (lambda row: [_number(row[column], column)]) if column in names else None


def text_encoder(
    names: Sequence[str], tokenizer: "PreTrainedTokenizerBase", arguments: ClassifyArguments, key: str
) -> RowEncoder:
    """Return the encoder of rows with a text or a conversation."""
    padding, length = padding_token(tokenizer), arguments.seq_length
    if detect_format(names, arguments, key, ("messages", "text")) == "messages":
        messages = arguments.messages_column
        return lambda row: [
            _strip_padding(
                chat_ids(
                    tokenizer, check_messages(row[messages]), template_inputs(row, arguments), length=length
                ),
                padding,
            )
        ]
    text = arguments.text_column
    return lambda row: [
        _strip_padding(encode_prefix(tokenizer, require_text(row[text], text), length)["input_ids"], padding)
    ]


def label_reader(
    names: Sequence[str], arguments: ClassifyArguments, labels: Sequence[str], kind: str, key: str
) -> RowNumbers:
    """Return the reader of a row's class, its multi-label vector, or its numbers.

    Args:
        names: Columns of the rows.
        arguments: Names of columns.
        labels: Names of the labels.
        kind: ``problem_type`` of the model.
        key: Argument that names the files, for errors.
    """
    require_label_column(names, arguments, key)
    column = arguments.label_column
    makers: dict[str, Callable[[Typed], list[float]]] = {
        "single_label_classification": lambda value: [float(_class(value, labels, column))],
        "multi_label_classification": lambda value: _multi_label(value, labels, column),
        "regression": lambda value: _numbers(value, len(labels), column),
    }
    make = makers[kind]
    return lambda row: make(row[column])


def _class(value: Typed, labels: Sequence[str], column: str) -> int:
    if isinstance(value, str) and value in labels:
        return labels.index(value)
    if isinstance(value, int) and 0 <= value < len(labels):
        return int(value)
    raise McaError(f"{column} is {value!r:.80}; expected one of {', '.join(labels)}, or its number from 0")


def _multi_label(value: Typed, labels: Sequence[str], column: str) -> list[float]:
    if isinstance(value, list) and all(isinstance(name, str) and name in labels for name in value):
        return [float(name in value) for name in labels]
    if isinstance(value, list) and len(value) == len(labels) and all(item in (0, 1) for item in value):
        return [float(item) for item in value]
    raise McaError(
        f"{column} is {value!r:.80}; expected a list of some of {', '.join(labels)}, or 0 or 1 for each of them"
    )


def _numbers(value: Typed, count: int, column: str) -> list[float]:
    values = value if isinstance(value, list) else [value]
    if len(values) != count:
        raise McaError(f"{column} has {len(values)} numbers, expected {count} (num_labels)")
    return [_number(item, column) for item in values]


def _number(value: Typed, column: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise McaError(f"{column} is {value!r:.80}; expected a number")
    return float(value)
