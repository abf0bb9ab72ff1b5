"""Texts of megabytes in one row are tokenized in parts here: tokenizers take hundreds of bytes of memory for a token.

The tokens are those of the whole text. Texts of usual length go through unchanged.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

LONG = 1 << 21
"""Letters above which a text is cut into pieces."""

_MAX_LETTERS_PER_TOKEN = 64  # of a token at most, on average
_MARGIN = 64  # tokens that the cut of a text may change before it
_PIECE = 1 << 20
_CUT_CONTEXT = 200
_MAX_CUT_ATTEMPTS = 32


class TokenPrefix(list[int]):
    """The tokens of the beginning of a text, whose rest is not tokenized."""


def encode_prefix(
    tokenizer: "PreTrainedTokenizerBase", text: str, length: int | None, **options: bool
) -> "BatchEncoding":
    """What ``tokenizer`` makes of ``text``, or, if that is much too long, of its beginning.

    Args:
        tokenizer: Hugging Face tokenizer.
        text: Of any length.
        length: Tokens that are wanted, which are those of the whole text, and more follow if it has more; None: all.
        options: Of the tokenizer.
    """
    size = _MAX_LETTERS_PER_TOKEN * (length or len(text))
    while length is not None and len(text) > size:
        found = tokenizer(text[:size], verbose=False, **options)
        if len(found["input_ids"]) > length + _MARGIN:
            found["input_ids"] = TokenPrefix(found["input_ids"])
            return found
        size *= 8
    return tokenizer(text, verbose=False, **options)


def encode_in_pieces(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """The tokens of a text of any length, without special ones."""
    return [
        token
        for piece in split_text(tokenizer, text)
        for token in tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
    ]


def split_text(tokenizer: "PreTrainedTokenizerBase", text: str, size: int = _PIECE) -> Iterator[str]:
    """``text`` in pieces of about ``size`` letters that are tokenized alike alone and together; whole if none are."""
    start = 0
    while len(text) - start > 2 * size:
        cut = _cut(tokenizer, text, start + size, start + 2 * size)
        if cut is None:
            break
        yield text[start:cut]
        start = cut
    yield text[start:]


def _cut(tokenizer: "PreTrainedTokenizerBase", text: str, first: int, last: int) -> int | None:
    def ids(part: str) -> list[int]:
        found: list[int] = tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    cut = first
    for _ in range(_MAX_CUT_ATTEMPTS):
        cut = min((at for space in " \n" if (at := text.find(space, cut + 1, last)) > 0), default=-1)
        if cut < 0:
            return None
        before, after = text[cut - _CUT_CONTEXT : cut], text[cut : cut + _CUT_CONTEXT]
        if ids(before + after) == ids(before) + ids(after):
            return cut
    return None
