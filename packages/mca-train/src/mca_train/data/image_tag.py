"""Checks of ``<image>`` and ``<video>`` in texts of rows without images or videos."""

import logging
from collections.abc import Set as AbstractSet

from mca_config.errors import McaError
from mca_config.types import Values
from mca_train.config.arguments import DataArguments, DefaultColumn
from mca_train.data.formats import image_columns, video_columns
from mca_train.data.message_parts import IMAGE, TAGS, VIDEO

logger = logging.getLogger(__name__)

IMAGE_TAG = TAGS[IMAGE]


class MediaTagCheck:
    """Check of texts with ``<image>`` or ``<video>`` but without the medium.

    Args:
        vision: Vision configuration of the model; None: a text model, without checks.
        arguments: Names of columns.
    """

    def __init__(self, vision: Values | None, arguments: DataArguments) -> None:
        self._has_vision = vision is not None
        self._columns = {IMAGE: image_columns(vision, arguments), VIDEO: video_columns(vision, arguments)}
        self._is_named = {
            medium: not isinstance(name, DefaultColumn)
            for medium, name in ((IMAGE, arguments.images_column), (VIDEO, arguments.videos_column))
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
        noun = "an image" if medium == IMAGE else "a video"
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
