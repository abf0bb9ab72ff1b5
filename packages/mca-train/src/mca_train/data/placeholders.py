"""Placeholders and tags of media, which a model would treat as text if they have no image."""

import logging
import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_config.types import Values
from mca_models.media import placeholders
from mca_models.templates import get_family
from mca_train.config.arguments import DataArguments, DefaultColumn
from mca_train.data.formats import COLUMN_KEYS, columns_by_medium
from mca_train.data.long_texts import encode_in_pieces
from mca_train.data.message_parts import IMAGE, NOUNS, TAGS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


VIDEO_TAG = "<video>"
"""Placeholder of a video of InternVL, which ``config.json`` does not name."""
logger = logging.getLogger(__name__)
IMAGE_TAG = TAGS[IMAGE]


def media_fields(config: McaModelConfig, tokenizer: "PreTrainedTokenizerBase") -> Values | None:
    """Return the vision configuration of a model, with a placeholder of videos that only the tokenizer has."""
    fields = config.vision_fields
    if fields is None:
        return None
    part = get_family(config.model_type).vision
    if part is None or part.video_tokens != "numbered" or VIDEO_TAG not in tokenizer.get_vocab():
        return fields
    return {**fields, "video_token_id": tokenizer.convert_tokens_to_ids(VIDEO_TAG)}


def require_no_placeholders(
    tokens: Sequence[int], vision: Values | None, place: str = "", *, media: AbstractSet[str] = frozenset()
) -> None:
    """Raise an error for placeholders of media that a row does not have.

    Args:
        tokens: Tokens of the row.
        vision: Vision configuration of the model; None: there are no placeholders.
        place: Prefix of the error.
        media: Media that the row has, whose placeholders are allowed.

    Raises:
        McaError: There is a placeholder.
    """
    for medium, token in placeholders(vision).items():
        if token in tokens and medium not in media:
            raise McaError(
                f"{place}the text contains the {medium} placeholder (token {token}), but the row has no {medium}; give "
                f"it as a part of type {medium} or in {medium}s_column, or remove the placeholder"
            )


def spell_placeholders(text: str, tokenizer: "PreTrainedTokenizerBase", vision: Values | None) -> list[int]:
    """Tokenize ``text`` with its placeholders as plain text."""
    written = tokenizer.convert_ids_to_tokens(list(placeholders(vision).values()))
    tokens: list[int] = []
    for piece in re.split(f"({'|'.join(map(re.escape, written))})", text):
        if piece in written:
            spelt = tokenizer(piece, add_special_tokens=False, split_special_tokens=True)
            tokens += spelt["input_ids"]
        elif piece:
            tokens += encode_in_pieces(tokenizer, piece)
    return tokens


class MediaTagCheck:
    """Check of texts with the tag of a medium but without the medium.

    Args:
        vision: Vision configuration of the model; None: a text model, without checks.
        arguments: Names of columns.
    """

    def __init__(self, vision: Values | None, arguments: DataArguments) -> None:
        self._has_vision = vision is not None
        self._columns = columns_by_medium(vision, arguments)
        self._is_named = {
            medium: not isinstance(getattr(arguments, key), DefaultColumn)
            for medium, key in COLUMN_KEYS.items()
        }
        self._warned: set[str] = set()

    def check(self, text: str, names: AbstractSet[str], source: str) -> None:
        """Warn once that a tag in ``text`` is trained as plain text.

        Args:
            text: Text of a row without media.
            names: Columns of the row.
            source: Name of the text, for errors.

        Raises:
            McaError: No column of the medium is set or present.
        """
        for medium in TAGS if self._has_vision else ():
            self._check(medium, text, names, source)

    def _check(self, medium: str, text: str, names: AbstractSet[str], source: str) -> None:
        tag, columns = TAGS[medium], self._columns[medium]
        if tag not in text or tag.replace("<", "</") in text:  # part of an XML element
            return
        noun = NOUNS[medium]
        if not self._is_named[medium] and names.isdisjoint(columns):
            raise McaError(
                f"{source} has {tag}, the placeholder of {noun}, but the rows have no column "
                f"{' or '.join(columns)}; set {medium}s_column to the column with the {medium}s; if {tag} is plain "
                f"text, set {medium}s_column to the {medium} column of other rows, or to any unused name"
            )
        if medium not in self._warned:
            logger.warning(
                "%s in the text of a row without %s in %s is trained as text; this is reported once",
                tag,
                noun,
                " or ".join(columns),
            )
            self._warned.add(medium)
