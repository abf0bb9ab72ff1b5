"""Conversations to tokens, with the assistant's words marked as the targets.

The conversation is rendered once, by the tokenizer's own chat template, and every assistant turn is found
in that text; so what is trained on is exactly what the template makes at inference, also where it treats
the last turn differently from earlier ones.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError

from mca_config.errors import McaError

Message = dict[str, Any]
Span = tuple[int, int]


def render(tokenizer: Any, messages: Sequence[Message], *, prompt: bool = False) -> str:
    """The conversation as text; with ``prompt`` also the words that open the assistant's turn.

    Raises:
        McaError: The tokenizer's template fails or refuses.
    """
    try:
        return str(
            tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
        )
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise McaError(f"messages: the tokenizer's chat template cannot render them: {reason}") from error


def answer_spans(tokenizer: Any, messages: Sequence[Message], first: int = 0) -> tuple[str, list[Span]]:
    """The conversation's text, and where in it the assistant speaks.

    Args:
        tokenizer: With a chat template.
        messages: ``{"role": ..., "content": ...}`` each.
        first: Turns before this one are context even if the assistant's.

    Raises:
        McaError: The template writes a turn in a way that cannot be found in the whole.
    """
    whole = render(tokenizer, messages)
    spans = [
        _answer_span(tokenizer, messages, turn, whole)
        for turn, message in enumerate(messages)
        if turn >= first and message["role"] == "assistant"
    ]
    return whole, spans


def _answer_span(tokenizer: Any, messages: Sequence[Message], turn: int, whole: str) -> Span:
    start = _start_of(tokenizer, messages[:turn], whole)
    if turn == len(messages) - 1:
        return start, len(whole)
    upto = render(tokenizer, messages[: turn + 1])
    if whole.startswith(upto):
        return start, len(upto)
    # The template writes this turn differently once it is no longer the last (Qwen3 drops the thinking):
    # find its words, and what closes a turn.
    content = str(messages[turn]["content"] or "").strip()
    closing = upto[upto.rfind(content) + len(content) :]
    end = whole.find(content, start) + len(content)
    if end < start + len(content) or not whole.startswith(closing, end):
        raise McaError(
            f"messages: turn {turn} cannot be found in the text that the chat template makes; use a template "
            "whose earlier turns do not change when turns follow"
        )
    return start, end + len(closing)


def _start_of(tokenizer: Any, context: Sequence[Message], whole: str) -> int:
    if not context:
        return 0
    for prompt in (True, False):
        text = render(tokenizer, context, prompt=prompt)
        if whole.startswith(text):
            return len(text)
    raise McaError(
        f"messages: the chat template does not write the first {len(context)} turns as the beginning of the "
        "whole conversation, so the answer cannot be told from its prompt"
    )


def tokenize_chat(
    tokenizer: Any, messages: Sequence[Message], first: int = 0
) -> tuple[list[int], list[bool]]:
    """Tokens of the conversation, and which are the assistant's (its end-of-turn mark included)."""
    if tokenizer.chat_template is None:
        raise McaError("messages: the tokenizer has no chat template; set `chat_template` in its directory")
    text, spans = answer_spans(tokenizer, messages, first)
    if not tokenizer.is_fast:
        return _tokenize_pieces(tokenizer, text, spans)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    targets = [
        any(start <= begin < end for start, end in spans) and stop > begin
        for begin, stop in encoded["offset_mapping"]
    ]
    return encoded["input_ids"], targets


def _tokenize_pieces(tokenizer: Any, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
    """Without offsets (slow tokenizers): each piece of the text on its own."""
    tokens: list[int] = []
    targets: list[bool] = []
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    for number, (start, end) in enumerate(pairwise(edges)):
        ids = tokenizer(text[start:end], add_special_tokens=False)["input_ids"] if end > start else []
        tokens += ids
        targets += [number % 2 == 1] * len(ids)
    return tokens, targets
