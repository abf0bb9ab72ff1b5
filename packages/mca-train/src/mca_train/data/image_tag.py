"""Checks of ``<image>``, ``<video>`` and ``<audio>`` in texts of rows without these media."""

import logging
from collections.abc import Set as AbstractSet

from mca_config.errors import McaError
from mca_config.types import Values
from mca_train.config.arguments import DataArguments, DefaultColumn
from mca_train.data.formats import COLUMN_KEYS, columns_by_medium
from mca_train.data.message_parts import IMAGE, NOUNS, TAGS

logger = logging.getLogger(__name__)

IMAGE_TAG = TAGS[IMAGE]


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
