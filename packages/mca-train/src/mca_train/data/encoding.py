"""Tokenization of single rows into token ids and targets, for pre-training and fine-tuning.

A row has one answer, or a chosen and a rejected one. Errors name the problem of a row; the caller adds its location.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, TypeVar, cast

from mca_config.errors import McaError
from mca_config.types import Values
from mca_models.media import placeholders
from mca_train.config.arguments import DataArguments, PairArguments
from mca_train.data.chat import RESERVED_OPTIONS, Message, TemplateInputs, tokenize_chat
from mca_train.data.files import require_column
from mca_train.data.formats import TEMPLATE_INPUTS, detect_format, media_columns, row_converter
from mca_train.data.long_texts import LONG, encode_in_pieces, encode_prefix
from mca_train.data.message_parts import require_no_data, with_types
from mca_train.data.placeholders import MediaTagCheck, require_no_placeholders, spell_placeholders
from mca_train.data.tools import parse_mapping, parse_tools, with_parsed_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

T = TypeVar("T")
Encoded = tuple[list[int], list[bool]]
"""Tokens of a sequence, and a mask of its targets."""
RowEncoder = Callable[[Values], Sequence[Encoded]]
"""Function from a row to its sequences: one, or several for preference data."""
RowNumbers = Callable[[Values], list[float]]
"""Function from a row to the extra numbers of its sequences, such as a class."""
AnswersTokenizer = Callable[
    ["PreTrainedTokenizerBase", object, Sequence[object], int, TemplateInputs], list[Encoded]
]
"""Function from a prompt and its completions to their sequences."""
TextOrMessages = str | list[Message]
"""Prompt or answer, as text or as chat messages."""
BlockTokenizer = Callable[[Sequence[Values], Sequence[str]], list[list[int]]]
"""Function from rows and their locations to the tokens of each text."""


def block_tokenizer(
    names: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    arguments: DataArguments,
    key: str,
    vision: Values | None = None,
) -> BlockTokenizer:
    """Return the function from rows and their locations to the tokens of each text, with EOS; empty texts are skipped.

    Args:
        names: Columns of the rows.
        tokenizer: Tokenizer of the model.
        arguments: Names of columns.
        key: Argument that names the files, for errors.
        vision: Vision configuration of the model; None: a text model.
    """
    column = arguments.text_column
    require_column(names, column, key)
    eos = _eos(tokenizer)
    pictures = media_columns(vision, arguments)
    tags = MediaTagCheck(vision, arguments)
    marks = set(placeholders(vision).values())
    has_warned = False

    def spell(tokens: list[int], text: str, place: str) -> list[int]:
        nonlocal has_warned
        if marks.isdisjoint(tokens):
            return tokens
        words = spell_placeholders(text, tokenizer, vision)
        require_no_placeholders(words, vision, f"{key}, {place}: ")
        if not has_warned:
            logger.warning(
                "%s, %s: the text contains the tokenizer's placeholder of an image, video or audio clip, but the "
                "row has none; it is tokenized as plain text; this is reported once",
                key,
                place,
            )
            has_warned = True
        return words

    def tokenize(rows: Sequence[Values], places: Sequence[str]) -> list[list[int]]:
        for row, place in zip(rows, places, strict=True):
            if not isinstance(row[column], str | None):
                raise McaError(f"{key}, {place}: {column} is {row[column]!r:.80}; expected text")
            if found := [name for name in pictures if row.get(name)]:
                raise McaError(
                    f"{key}, {place}: has {found[0]}, which only mca-train pretrain with a vision-language model "
                    "reads; remove the row, or the column"
                )
            tags.check(row[column] or "", row.keys(), f"{key}, {place}: {column}")
        spoken = [(row[column], place) for row, place in zip(rows, places, strict=True) if row[column]]
        texts = [text for text, _ in spoken]
        if any(len(text) > LONG for text in texts):
            ids = [encode_in_pieces(tokenizer, text) for text in texts]
        else:
            ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        return [[*spell(tokens, text, place), eos] for tokens, (text, place) in zip(ids, spoken, strict=True)]

    return tokenize


class WarningRecorder(logging.Handler):
    """Logging handler that keeps the texts of warnings in ``lines``, to report them again."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Append the text of ``record``."""
        self.lines.append(record.getMessage())


def row_encoder(
    names: Sequence[str], tokenizer: "PreTrainedTokenizerBase", arguments: DataArguments, key: str
) -> RowEncoder:
    """Return the encoder of rows with one answer, chosen by their format."""
    length = arguments.seq_length
    if (other := row_converter(names, arguments, key)) is not None:
        encode = row_encoder(other.names, tokenizer, replace(arguments, data_format="messages"), key)
        return lambda row: encode(other.convert(row))
    kind = detect_format(names, arguments, key)
    if kind == "messages":
        messages = arguments.messages_column
        return lambda row: [
            tokenize_chat(
                tokenizer,
                _require_answers(check_messages(row[messages])),
                inputs=template_inputs(row, arguments),
                length=length,
            )
        ]
    if kind == "prompt_completion":
        prompt, completion = arguments.prompt_column, arguments.completion_column
        return lambda row: [
            tokenize_answer(tokenizer, row[prompt], row[completion], length, template_inputs(row, arguments))
        ]
    text = arguments.text_column
    return lambda row: [tokenize_answer(tokenizer, "", require_text(row[text], text), length)]


def template_inputs(row: Values, arguments: DataArguments) -> TemplateInputs:
    """Return a row's inputs of the chat template: tools and template variables.

    Raises:
        McaError: The columns have the wrong type.
    """
    tools = parse_tools(row.get(arguments.tools_column), arguments.tools_column)
    raw_options = row.get(TEMPLATE_INPUTS)
    options = parse_mapping(raw_options) if raw_options else {}
    if options is None:
        raise McaError(f"{TEMPLATE_INPUTS} is {raw_options!r:.80}; expected a mapping, or that as JSON text")
    if reserved := sorted(options.keys() & RESERVED_OPTIONS):
        raise McaError(f"{TEMPLATE_INPUTS}: '{reserved[0]}' is no variable of a template; remove it")
    return TemplateInputs(without_nulls(tools), without_nulls(options))


def without_nulls(value: T, kept: str = "") -> T:
    """Return ``value`` without null keys, which Arrow adds to rows that lack a key of other rows.

    The value of the key ``kept`` is not changed.
    """
    if isinstance(value, dict):
        present = {key: item for key, item in value.items() if item is not None}
        return cast(
            "T", {key: item if key == kept else without_nulls(item, kept) for key, item in present.items()}
        )
    return cast("T", [without_nulls(item, kept) for item in value]) if isinstance(value, list) else value


def tokenize_answer(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: object,
    completion: object,
    length: int,
    inputs: TemplateInputs | None = None,
) -> Encoded:
    """Tokenize a prompt and a completion, as text or as chat messages; the completion ends with EOS."""
    (encoded,) = tokenize_answers(tokenizer, prompt, [completion], length, inputs)
    if isinstance(prompt, list) and isinstance(completion, list):
        _require_answers([*prompt, *completion], first=len(prompt))
    return encoded


def tokenize_answers(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: object,
    completions: Sequence[object],
    length: int,
    inputs: TemplateInputs | None = None,
) -> list[Encoded]:
    """Tokenize several completions of one prompt, as text or as chat messages; each ends with EOS.

    For a much longer text, only the first ``length`` tokens are guaranteed.
    """
    if isinstance(prompt, list):
        found = []
        for completion in completions:
            if not isinstance(completion, list):
                raise McaError(
                    f"the prompt is a list of messages, so the completion must be; got {completion!r:.80}"
                )
            turns = check_messages([*prompt, *completion])
            found.append(tokenize_chat(tokenizer, turns, first=len(prompt), inputs=inputs, length=length))
        return found
    texts = [text for text in completions if isinstance(text, str)]
    if not isinstance(prompt, str) or len(texts) < len(completions):
        wrong = next((text for text in completions if not isinstance(text, str)), completions[0])
        raise McaError(f"prompt and completion must be text; got {prompt!r} and {wrong!r}")
    return _tokenize_texts(tokenizer, prompt, texts, length)


def _tokenize_texts(
    tokenizer: "PreTrainedTokenizerBase", prompt: str, completions: Sequence[str], length: int
) -> list[Encoded]:
    """Tokenize the prompt with each completion as one text.

    Targets begin where the tokens of the prompt alone and of the full text differ; a pair uses the first such position
    of both, because a token may span prompt and completion.
    """
    eos = _eos(tokenizer)
    context = encode_prefix(tokenizer, prompt, length)["input_ids"] if prompt else []
    if context and context[-1] == eos:
        own = encode_prefix(tokenizer, prompt, length, add_special_tokens=False)["input_ids"]
        # the tokenizer may append EOS, which does not end the prompt
        if _count_trailing(context, eos) > _count_trailing(own, eos):
            context = context[:-1]
    wholes = [encode_prefix(tokenizer, prompt + text, length)["input_ids"] for text in completions]
    shared = min(_common_prefix(context, whole) for whole in wholes)
    ended = [whole if len(whole) > shared and whole[-1] == eos else [*whole, eos] for whole in wholes]
    return [(whole, [place >= shared for place in range(len(whole))]) for whole in ended]


def _common_prefix(tokens: Sequence[int], others: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, others, strict=False)))


def _count_trailing(tokens: Sequence[int], eos: int) -> int:
    return sum(1 for _ in takewhile(lambda token: token == eos, reversed(tokens)))


def check_messages(messages: object) -> list[Message]:
    """Validate ``messages``; return them without null keys and with mappings as tool-call arguments.

    Raises:
        McaError: Not a list of messages with a role and content (or tool calls of an assistant).
    """
    if not isinstance(messages, list) or not messages:
        raise McaError(f"messages must be a list of turns; got {messages!r:.80}")
    for turn, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise McaError(f"messages, turn {turn}: expected a mapping with 'role' and 'content'")
        _require_content(turn, message)
    return [_normalise_turn(message, turn) for turn, message in enumerate(messages)]


def _normalise_turn(message: Message, turn: int) -> Message:
    """Normalize a turn for chat templates."""
    found = without_nulls(message, "arguments")
    if "content" in found:
        found["content"] = with_types(found["content"])
    return with_parsed_arguments(found, turn)


def _require_content(turn: int, message: Message) -> None:
    content, role = message.get("content"), message["role"]
    if not isinstance(content, str | list | None):
        raise McaError(f"messages, turn {turn} ({role}): content is {content!r:.80}; expected text")
    require_no_data(content)
    if message.get("weight") not in (None, 0, 1):
        raise McaError(
            f"messages, turn {turn} ({role}): weight is {message['weight']!r:.80}; expected 0 or 1"
        )
    if content is None and (role != "assistant" or _is_empty(message)):
        raise _missing_content(turn, role)


def _require_answers(messages: list[Message], first: int = 0) -> list[Message]:
    """Return ``messages`` if none of the answers from the turn ``first`` on is an end mark alone.

    Turns of weight 0 are context, which may be empty.

    Raises:
        McaError: An answer is empty.
    """
    for turn, message in enumerate(messages):
        is_answer = turn >= first and message["role"] == "assistant" and message.get("weight") != 0
        if is_answer and _is_empty(message):
            raise _missing_content(turn, "assistant")
    return messages


def _is_empty(message: Message) -> bool:
    """Return True for a turn without content, tool calls and other parts of an answer."""
    return not any(value for key, value in message.items() if key not in ("role", "name", "weight"))


def _missing_content(turn: int, role: str) -> McaError:
    wanted = "content or tool_calls" if role == "assistant" else "content"
    return McaError(f"messages, turn {turn} ({role}): no {wanted}; add it, or remove the row")


def require_text(value: object, column: str) -> str:
    """Return ``value`` of ``column`` if it is text, else raise a `McaError`."""
    if not isinstance(value, str):
        raise McaError(f"{column} is {value!r:.80}; expected text")
    return value


def _eos(tokenizer: "PreTrainedTokenizerBase") -> int:
    if tokenizer.eos_token_id is None:
        raise McaError("the tokenizer has no end-of-sequence token; set `eos_token` in its directory")
    return int(tokenizer.eos_token_id)


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
