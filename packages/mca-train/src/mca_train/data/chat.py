"""Tokenization of conversations, with the assistant's turns as targets.

The tokenizer's chat template renders the conversation once, and each assistant turn is located in that text. So
training uses exactly the text that the template makes at inference, even if the template treats the last turn
differently. A template that marks answers (``{% generation %}``) is followed. `encoding` validates the messages of a
row.
"""

import copy
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

from jinja2 import TemplateError, TemplateSyntaxError

from mca_config.errors import McaError
from mca_config.types import JsonObject
from mca_train.data.formats import NO_TEMPLATE
from mca_train.data.long_texts import encode_prefix
from mca_train.data.tools import Tools, with_arguments, with_arguments_as_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Message = JsonObject
Span = tuple[int, int]
_MARKS_ANSWERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_PLACEHOLDER = "\ue000"  # a private-use character that no text contains
_PRINTED = {"argument": "as Python writes it"}
_IMAGE_TEXT = "mca_image_text"  # attribute of a tokenizer
_THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thoughts")
RESERVED_OPTIONS = frozenset(
    (
        *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "tokenize"),
        *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("tokenizer_kwargs", "return_assistant_tokens_mask", "sanitize_control_tokens"),
    )
)
"""Options of ``apply_chat_template`` that are not variables of the template."""


@dataclass(frozen=True)
class TemplateInputs:
    """Inputs of the chat template in addition to messages.

    Args:
        tools: Tools of the row; None: there are none.
        options: Template variables, such as ``enable_thinking``.
    """

    tools: Tools | None = None
    options: JsonObject = field(default_factory=dict)


def with_image_text(tokenizer: "PreTrainedTokenizerBase", mark: str, text: str) -> "PreTrainedTokenizerBase":
    """Return a copy of ``tokenizer`` that replaces ``mark`` by ``text`` in rendered chats.

    As in processors, the rendered text is changed, not the template, because Jinja strips line breaks next to tags.
    """
    changed = copy.copy(tokenizer)
    setattr(changed, _IMAGE_TEXT, (mark, text))
    return changed


def has_generation_marks(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return True if the chat template marks answers with ``{% generation %}``."""
    template = tokenizer.chat_template
    templates = template.values() if isinstance(template, dict) else [template or ""]
    return any(_MARKS_ANSWERS.search(text) for text in templates)


class Conversation:
    """Messages rendered by the tokenizer's chat template.

    Args:
        tokenizer: Tokenizer with a chat template.
        messages: Messages ``{"role": ..., "content": ...}``; arguments of tool calls are mappings.
        inputs: Other inputs of the template.

    Raises:
        McaError: The template fails to render the messages.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        messages: Sequence[Message],
        inputs: TemplateInputs | None = None,
    ) -> None:
        if tokenizer.chat_template is None:
            raise McaError(f"messages: {NO_TEMPLATE}")
        self._tokenizer, self._inputs = tokenizer, inputs or TemplateInputs()
        self._messages = list(messages)
        texts = [with_arguments_as_text(message) for message in messages]
        try:
            self.text = self._render(self._messages)
            found = self._try_render(texts) if self._prints_python_mappings() else None
        except McaError:
            found = self._try_render(texts) if texts != self._messages else None
            if found is None:
                raise
        if found is not None:
            self._messages, self.text = texts, found
        if (
            self._inputs.tools
            and self._try_render(self._messages, TemplateInputs(None, self._inputs.options)) == self.text
        ):
            _warn_omitted(str(self._tokenizer.chat_template), "tools")

    def _prints_python_mappings(self) -> bool:
        """Return True if the template prints mappings as Python literals instead of JSON."""
        others = [with_arguments(message, lambda _: _PRINTED) for message in self._messages]
        return others != self._messages and str(_PRINTED) in (self._try_render(others) or "")

    def _omits_calls(self, turns: Iterable[int]) -> bool:
        """Return True if the template does not render the tool calls of ``turns``."""
        without = [*self._messages]
        for turn in turns:
            without[turn] = _without(without[turn], "tool_calls")
        return without != self._messages and self._try_render(without) == self.text

    def _require_content(self, turns: Iterable[int]) -> None:
        """Raise an error if the text stays the same with other words in all ``turns``."""
        others = [*self._messages]
        for turn in turns:
            if others[turn].get("content") and not others[turn].get("tool_calls"):
                others[turn] = {**others[turn], "content": _PLACEHOLDER}
        if others != self._messages and self._try_render(others) == self.text:
            raise McaError(
                "messages: the chat template does not write the content of answers; correct the template "
                "(mca-train data shows what it writes)"
            )

    def context_text(self) -> str:
        """Return the text as context without targets."""
        self._warn_omitted_calls(range(len(self._messages)))
        return self.text

    def _warn_omitted_calls(self, turns: Iterable[int]) -> None:
        if self._omits_calls(turns):
            _warn_omitted(str(self._tokenizer.chat_template), "tool_calls")

    def _try_render(self, messages: Sequence[Message], inputs: TemplateInputs | None = None) -> str | None:
        """Return the rendered messages; None: the template raises an error."""
        try:
            return self._render(messages, inputs=inputs)
        except McaError:
            return None

    def _render(
        self, messages: Sequence[Message], *, prompt: bool = False, inputs: TemplateInputs | None = None
    ) -> str:
        """Render ``messages``; ``prompt`` adds the generation prompt."""
        given = inputs or self._inputs
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages),
                tools=given.tools,
                tokenize=False,
                add_generation_prompt=prompt,
                **given.options,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:200]
            if isinstance(error, TemplateSyntaxError):
                reason = f"line {error.lineno} of the template: {reason}; correct the template"
            raise McaError(f"messages: the tokenizer's chat template cannot render them: {reason}") from error
        return self._with_image_text(str(rendered))

    def _with_image_text(self, rendered: str) -> str:
        """Replace image marks as the processor does."""
        replaced: tuple[str, str] | None = getattr(self._tokenizer, _IMAGE_TEXT, None)
        return rendered.replace(*replaced) if replaced else rendered

    def text_and_targets(self, first: int = 0) -> tuple[str, list[Span]]:
        """Return the text, closed after its last answer, and the spans of the assistant's answers.

        Args:
            first: Assistant turns before this one are context.

        Raises:
            McaError: A turn cannot be located in the full text, or the template does not render the text or the tool
                calls of an answer.
        """
        template = self._tokenizer.get_chat_template(None, self._inputs.tools)
        turns = [
            turn
            for turn, message in enumerate(self._messages)
            if message["role"] == "assistant" and turn >= first
        ]
        context = [turn for turn in turns if self._messages[turn].get("weight") == 0]
        answers = [turn for turn in turns if turn not in context]
        if self._omits_calls(answers):
            raise McaError(
                "messages: the chat template does not write tool_calls; use a template that does, or remove the row"
            )
        self._warn_omitted_calls(turn for turn in range(len(self._messages)) if turn not in answers)
        if _MARKS_ANSWERS.search(template):
            begin = self._turn_start(first) if first else 0
            left_out = [(self._turn_start(turn), self._turn_end(turn)) for turn in context]
            return self.text, [
                (start, end)
                for start, end in self._generation_spans(template)
                if start >= begin and not any(low <= start < high for low, high in left_out)
            ]
        spans = {turn: (self._turn_start(turn), self._turn_end(turn)) for turn in answers}
        closing = self._closing(turns[0]) if spans else None
        if closing is None:
            self._require_content(answers)
        if closing is None or closing.strip():
            return self.text, list(spans.values())
        return self._with_turn_ends(spans)

    def _generation_spans(self, template: str) -> list[Span]:
        """Return the spans that the template marks with ``{% generation %}``."""
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, marked = render_jinja_template(
            conversations=[self._messages],
            tools=self._inputs.tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **{**self._tokenizer.special_tokens_map, **self._inputs.options},
        )
        text = str(rendered[0])

        def moved(edge: int) -> int:
            return len(self._with_image_text(text[:edge]))

        return [(moved(start), moved(end)) for start, end in marked[0]]

    def _turn_start(self, turn: int) -> int:
        context = self._messages[:turn]
        if not context:
            return 0
        opened = self._render(context, prompt=True)
        if self.text.startswith(opened):
            return len(opened)
        before, _ = self._around(turn)  # the prompt opens a thinking block, which earlier turns lack
        for text in (before, self._render(context)):
            if text and self.text.startswith(text):
                return len(text)
        raise McaError(
            f"messages: the chat template does not write the first {turn} turns as the beginning of the "
            "whole conversation, so the answer cannot be distinguished from its prompt"
            "; give rows with prompt and completion, or correct the template"
        )

    def _turn_end(self, turn: int) -> int:
        """Return the end of a turn, including its end-of-turn token."""
        if turn == len(self._messages) - 1:
            return len(self.text)
        upto = self._messages[: turn + 1]
        # templates drop the thinking of earlier turns
        bare = [_without(message, *_THOUGHTS) for message in upto]
        mute = [{**message, "content": ""} if message.get("tool_calls") else message for message in bare]
        tried: list[list[Message]] = []
        for messages in (upto, bare, mute):
            text = None if messages in tried else self._try_render(messages)
            if text and self.text.startswith(text):
                return len(text)
            tried.append(messages)
        # The template renders this turn differently when it is not the last (Qwen3 drops the thinking). The text after
        # it is the same for any other answer, and begins with the end of the turn.
        _, after = self._around(turn)
        if after and self.text.endswith(after):
            closing = self._closing(turn)
            if closing is None or not after.startswith(closing):
                # The last turn of a conversation ends differently.
                closing = self._leading_special_token(after, spaces=True) or None
            if closing is not None:
                return len(self.text) - len(after) + len(closing)
        raise McaError(
            f"messages: turn {turn} cannot be found in the text that the chat template makes; use a template "
            "whose earlier turns do not change when turns follow, or that marks answers ({% generation %})"
        )

    def _around(self, turn: int) -> tuple[str, str]:
        """Return the text before and after a turn, rendered with a placeholder answer; empty if rendering fails."""
        messages: list[Message] = [*self._messages]
        messages[turn : turn + 1] = [{"role": "assistant", "content": _PLACEHOLDER}]
        before, _, after = (self._try_render(messages) or "").rpartition(_PLACEHOLDER)
        return before, after

    def _closing(self, turn: int) -> str | None:
        """Return the text after a last answer; None: the template does not render answers verbatim."""
        rendered = self._try_render([*self._messages[:turn], {"role": "assistant", "content": _PLACEHOLDER}])
        _, found, closing = (rendered or "").rpartition(_PLACEHOLDER)
        return closing if found else None

    def _with_turn_ends(self, spans: dict[int, Span]) -> tuple[str, list[Span]]:
        """End answers without an end-of-turn token: at the start of the next turn (GLM), or the last one with EOS."""
        text, found = self.text, []
        for turn, (start, end) in spans.items():
            if turn == len(self._messages) - 1:
                mark = self._last_turn_end()
                text += mark
            else:
                mark = self._leading_special_token(self.text[end:])
            found.append((start, end + len(mark)))
        return text, found

    def _last_turn_end(self) -> str:
        *context, last = self._messages
        following = {"role": "tool" if last.get("tool_calls") else "user", "content": _PLACEHOLDER}
        rendered = self._try_render([*context, {"role": "assistant", "content": _PLACEHOLDER}, following])
        parts = (rendered or "").split(_PLACEHOLDER)
        mark = self._leading_special_token(parts[1]) if len(parts) > 2 else ""
        if not (mark or self._tokenizer.eos_token):
            raise McaError(
                "messages: the chat template writes no end of an answer, and the tokenizer has no end-of-sequence "
                "token; set `eos_token` in its directory"
            )
        return mark or str(self._tokenizer.eos_token)

    def _leading_special_token(self, text: str, *, spaces: bool = False) -> str:
        """Return the special token at the start of ``text``; ``spaces`` includes the white space after it."""
        words = text.lstrip()
        token = next((token for token in _special_tokens(self._tokenizer) if words.startswith(token)), "")
        if not token:
            return ""
        rest = words[len(token) :]
        end = len(text) - len(rest.lstrip() if spaces else rest)
        return text[:end]


def _without(message: Message, *keys: str) -> Message:
    return {key: value for key, value in message.items() if key not in keys}


@lru_cache(maxsize=4)
def _special_tokens(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Return the special tokens, longest first."""
    found = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(found, key=len, reverse=True)


@lru_cache(maxsize=64)
def _warn_omitted(_: str, what: str) -> None:
    """Log a warning once per template."""
    logger.warning("the chat template does not write a row's %s, so the model does not see them", what)


def chat_ids(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    inputs: TemplateInputs | None = None,
    *,
    length: int | None = None,
) -> list[int]:
    """Tokenize the rendered conversation without targets; for the arguments see `tokenize_chat`."""
    text = Conversation(tokenizer, messages, inputs).context_text()
    tokens: list[int] = encode_prefix(tokenizer, text, length, add_special_tokens=False)["input_ids"]
    return tokens


def tokenize_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    first: int = 0,
    inputs: TemplateInputs | None = None,
    *,
    length: int | None = None,
) -> tuple[list[int], list[bool]]:
    """Tokenize a conversation and mark the assistant's tokens, including its end-of-turn token.

    A token that begins before the assistant's first letter and contains it, such as a space with the next word, is a
    target.

    Args:
        tokenizer: Tokenizer with a chat template.
        messages: Messages ``{"role": ..., "content": ...}``.
        first: Assistant turns before this one are context.
        inputs: Other inputs of the template.
        length: Number of tokens needed; None: all. Much longer conversations are tokenized only partly.
    """
    text, spans = Conversation(tokenizer, messages, inputs).text_and_targets(first)
    if not tokenizer.is_fast:
        return _tokenize_pieces(tokenizer, text, spans)
    encoded = encode_prefix(tokenizer, text, length, add_special_tokens=False, return_offsets_mapping=True)
    targets = [
        any(begin < end and stop > start for start, end in spans if end > start) and stop > begin
        for begin, stop in encoded["offset_mapping"]
    ]
    return encoded["input_ids"], targets


def _tokenize_pieces(
    tokenizer: "PreTrainedTokenizerBase", text: str, spans: Sequence[Span]
) -> tuple[list[int], list[bool]]:
    """Tokenize spans separately, for slow tokenizers without offsets."""
    tokens: list[int] = []
    targets: list[bool] = []
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    for number, (start, end) in enumerate(pairwise(edges)):
        ids = tokenizer(text[start:end], add_special_tokens=False)["input_ids"] if end > start else []
        tokens += ids
        targets += [number % 2 == 1] * len(ids)
    return tokens, targets
