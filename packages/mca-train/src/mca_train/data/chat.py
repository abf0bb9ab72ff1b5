"""Conversations become tokens here, with the assistant's words marked as the targets.

The conversation is rendered once, by the tokenizer's own chat template, and every assistant turn is found in that text.
So what is trained on is exactly what the template makes at inference, also where it treats the last turn differently
from earlier ones. A template that marks answers itself (``{% generation %}``) is followed. Whether a row holds
messages, and whether these are well formed, is decided in `encoding`.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from mca_config.errors import McaError
from mca_config.types import JsonObject
from mca_train.data.long_texts import head_encoding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = JsonObject
Tools = list[JsonObject]
Span = tuple[int, int]
_MARKS_ANSWERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_STAND_IN = "\ue000"  # an answer that no text contains


def marks_answers(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the tokenizer's chat template says itself what is an answer."""
    template = tokenizer.chat_template
    templates = template.values() if isinstance(template, dict) else [template or ""]
    return any(_MARKS_ANSWERS.search(text) for text in templates)


class Conversation:
    """Messages, and what the tokenizer's template makes of them.

    Args:
        tokenizer: With a chat template.
        messages: ``{"role": ..., "content": ...}`` each.
        tools: The tools for the template; None: there are none.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], tools: Tools | None = None
    ) -> None:
        self._tokenizer, self._messages, self._tools = tokenizer, list(messages), tools
        self.text = self._render(self._messages)

    def _render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """``messages`` as text; with ``prompt`` also the words that open the assistant's turn."""
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tools=self._tools, tokenize=False, add_generation_prompt=prompt
                )
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:200]
            raise McaError(f"messages: the tokenizer's chat template cannot render them: {reason}") from error

    def answers(self, first: int = 0) -> list[Span]:
        """Where in ``text`` the assistant speaks.

        Args:
            first: Turns before this one are context even if the assistant's.

        Raises:
            McaError: The template writes a turn in a way that cannot be found in the whole.
        """
        template = self._tokenizer.get_chat_template(None, self._tools)
        if _MARKS_ANSWERS.search(template):
            begin = self._start_of(first) if first else 0
            return [(start, end) for start, end in self._marked(template) if start >= begin]
        turns = [turn for turn, message in enumerate(self._messages) if message["role"] == "assistant"]
        return [(self._start_of(turn), self._end_of(turn)) for turn in turns if turn >= first]

    def _marked(self, template: str) -> list[Span]:
        """What stands between the template's own marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        _, marked = render_jinja_template(
            conversations=[self._messages],
            tools=self._tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        return [(start, end) for start, end in marked[0]]

    def _start_of(self, turn: int) -> int:
        context = self._messages[:turn]
        if not context:
            return 0
        opened = self._render(context, prompt=True)
        if self.text.startswith(opened):
            return len(opened)
        before, _ = self._around(turn)  # the prompt begins a thought, which earlier turns are written without
        for text in (before, self._render(context)):
            if text and self.text.startswith(text):
                return len(text)
        raise McaError(
            f"messages: the chat template does not write the first {turn} turns as the beginning of the "
            "whole conversation, so the answer cannot be distinguished from its prompt"
        )

    def _end_of(self, turn: int) -> int:
        """Where a turn ends, its mark included."""
        if turn == len(self._messages) - 1:
            return len(self.text)
        upto = self._render(self._messages[: turn + 1])
        if self.text.startswith(upto):
            return len(upto)
        # The template writes this turn differently once it is no longer the last (Qwen3 drops the thinking): what
        # follows it is the same after another answer, and begins with what closes a turn.
        _, after = self._around(turn)
        closed = self._render([*self._messages[:turn], {"role": "assistant", "content": _STAND_IN}])
        _, found, closing = closed.rpartition(_STAND_IN)
        if not found or not after or not self.text.endswith(after) or not after.startswith(closing):
            raise McaError(
                f"messages: turn {turn} cannot be found in the text that the chat template makes; use a template "
                "whose earlier turns do not change when turns follow, or that marks answers ({% generation %})"
            )
        return len(self.text) - len(after) + len(closing)

    def _around(self, turn: int) -> tuple[str, str]:
        """The text before and after a turn's words, as they are with other words."""
        messages: list[Message] = [*self._messages]
        messages[turn : turn + 1] = [{"role": "assistant", "content": _STAND_IN}]
        before, _, after = self._render(messages).rpartition(_STAND_IN)
        return before, after


def tokenize_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    first: int = 0,
    tools: Tools | None = None,
    *,
    length: int | None = None,
) -> tuple[list[int], list[bool]]:
    """Tokens of the conversation, and which are the assistant's (its end-of-turn mark included).

    A token that begins before the assistant's first letter and holds it (a space and the word after it) is the
    assistant's.

    Args:
        tokenizer: With a chat template.
        messages: ``{"role": ..., "content": ...}`` each.
        first: Turns before this one are context even if the assistant's.
        tools: The tools for the template.
        length: Tokens that are wanted; None: all. A much longer conversation is tokenized in part.
    """
    if tokenizer.chat_template is None:
        raise McaError("messages: the tokenizer has no chat template; set `chat_template` in its directory")
    conversation = Conversation(tokenizer, messages, tools)
    text, spans = conversation.text, conversation.answers(first)
    if not tokenizer.is_fast:
        return _tokenize_pieces(tokenizer, text, spans)
    encoded = head_encoding(tokenizer, text, length, add_special_tokens=False, return_offsets_mapping=True)
    targets = [
        any(begin < end and stop > start for start, end in spans if end > start) and stop > begin
        for begin, stop in encoded["offset_mapping"]
    ]
    return encoded["input_ids"], targets


def _tokenize_pieces(
    tokenizer: "PreTrainedTokenizerBase", text: str, spans: Sequence[Span]
) -> tuple[list[int], list[bool]]:
    """Without offsets (slow tokenizers): each piece of the text on its own."""
    tokens: list[int] = []
    targets: list[bool] = []
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    for number, (start, end) in enumerate(pairwise(edges)):
        ids = tokenizer(text[start:end], add_special_tokens=False)["input_ids"] if end > start else []
        tokens += ids
        targets += [number % 2 == 1] * len(ids)
    return tokens, targets
