"""Placeholders of images and videos among tokens: where nothing stands for them, a model would read them as words."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mca_config.errors import McaError
from mca_config.types import Values
from mca_models.images import placeholders
from mca_train.data.long_texts import encode_in_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def require_no_placeholders(
    tokens: Sequence[int], vision: Values | None, place: str = "", *, has_images: bool = False
) -> None:
    """Refuses placeholders of what a row does not have.

    Args:
        tokens: Of the row.
        vision: Of the model's configuration; None: no token is a placeholder.
        place: What the error begins with.
        has_images: The row has some, whose placeholders are counted elsewhere.

    Raises:
        McaError: There is one.
    """
    for medium, token in placeholders(vision).items():
        if token not in tokens or (medium == "image" and has_images):
            continue
        lacking = {
            "image": "but the row has no image; give it as a part of type image or in images_column, or remove the "
            "placeholder",
            "video": "and videos cannot be used; remove the row",
        }[medium]
        raise McaError(f"{place}the text contains the {medium} placeholder (token {token}), {lacking}")


def spell_placeholders(text: str, tokenizer: "PreTrainedTokenizerBase", vision: Values | None) -> list[int]:
    """The tokens of ``text`` in which placeholders are the letters that they are written with."""
    written = tokenizer.convert_ids_to_tokens(list(placeholders(vision).values()))
    tokens: list[int] = []
    for piece in re.split(f"({'|'.join(map(re.escape, written))})", text):
        if piece in written:
            spelt = tokenizer(piece, add_special_tokens=False, split_special_tokens=True)
            tokens += spelt["input_ids"]
        elif piece:
            tokens += encode_in_pieces(tokenizer, piece)
    return tokens
