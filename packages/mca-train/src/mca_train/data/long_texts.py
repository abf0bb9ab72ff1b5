"""Tokenization of very long texts in pieces, because tokenizers need hundreds of bytes of memory per token.

The tokens are the same as those of the whole text. Shorter texts are tokenized at once.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

LONG = 1 << 21
"""Number of letters above which a text is split into pieces."""

_MAX_LETTERS_PER_TOKEN = 64  # maximum average
_MARGIN = 64  # tokens before the cut that may differ from those of the full text
_PIECE = 1 << 20
_CUT_CONTEXT = 200
_MAX_CUT_ATTEMPTS = 32


class TokenPrefix(list[int]):
    """Tokens of the beginning of a text."""


def encode_prefix(
    tokenizer: "PreTrainedTokenizerBase", text: str, length: int | None, **options: bool
) -> "BatchEncoding":
    """Tokenize ``text``, or only its beginning if it is much longer than needed.

    Args:
        tokenizer: Hugging Face tokenizer.
        text: Text of any length.
        length: Number of tokens that must equal those of the full text; longer texts have more. None: all.
        options: Options of the tokenizer.
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
    """Tokenize a text of any length without special tokens."""
    return [
        token
        for piece in split_text(tokenizer, text)
        for token in tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
    ]


def split_text(tokenizer: "PreTrainedTokenizerBase", text: str, size: int = _PIECE) -> Iterator[str]:
    """Split ``text`` into pieces of about ``size`` letters whose tokens concatenate to those of the text."""
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
