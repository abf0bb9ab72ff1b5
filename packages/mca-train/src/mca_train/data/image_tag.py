"""``<image>`` in words that have no image for it: where it is text, and where it is refused."""

import logging
from collections.abc import Set as AbstractSet

from mca_config.errors import McaError
from mca_config.types import Values
from mca_train.config.arguments import DataArguments
from mca_train.config.usual import Usual
from mca_train.data.formats import image_columns

logger = logging.getLogger(__name__)

PLACE = "<image>"
_CLOSED = "</image>"  # an element of XML


class ImageWords:
    """What is said of words with ``<image>`` and no image.

    Args:
        vision: Of the model's configuration; None: it sees no images, and nothing is said.
        arguments: Columns.
    """

    def __init__(self, vision: Values | None, arguments: DataArguments) -> None:
        self._sees = vision is not None
        self._columns = image_columns(vision, arguments)
        self._is_named = not isinstance(arguments.images_column, Usual)
        self._has_told = False

    def meet(self, text: str, names: AbstractSet[str], told: str) -> None:
        """Says once that ``<image>`` in ``text`` is trained as text.

        Args:
            text: Of a row without images.
            names: The row's columns.
            told: Whose text it is, for the error.

        Raises:
            McaError: Nothing says which column has images.
        """
        if not self._sees or PLACE not in text or _CLOSED in text:
            return
        if not self._is_named and names.isdisjoint(self._columns):
            raise McaError(
                f"{told} has {PLACE}, the place of an image, but the rows have no column "
                f"{' or '.join(self._columns)}; set images_column to the name of theirs, or, if {PLACE} is text, to "
                "that of other rows with images, or to any if there are none"
            )
        if not self._has_told:
            logger.warning(
                "%s in the text of a row without an image in %s is trained as text; this is reported once",
                PLACE,
                " or ".join(self._columns),
            )
            self._has_told = True
