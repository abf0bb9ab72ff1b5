"""``<image>`` in words that have no image for it: where it is text, and where it is refused."""

import logging
from collections.abc import Set as AbstractSet

from mca_config.errors import McaError
from mca_config.types import Values
from mca_train.config.arguments import DataArguments
from mca_train.config.default_column import DefaultColumn
from mca_train.data.formats import image_columns

logger = logging.getLogger(__name__)

IMAGE_TAG = "<image>"
_CLOSING_TAG = "</image>"  # an element of XML


class ImageTagCheck:
    """What is said of words with ``<image>`` and no image.

    Args:
        vision: Of the model's configuration; None: it sees no images, and nothing is said.
        arguments: Columns.
    """

    def __init__(self, vision: Values | None, arguments: DataArguments) -> None:
        self._has_vision = vision is not None
        self._columns = image_columns(vision, arguments)
        self._is_named = not isinstance(arguments.images_column, DefaultColumn)
        self._has_warned = False

    def meet(self, text: str, names: AbstractSet[str], told: str) -> None:
        """Says once that ``<image>`` in ``text`` is trained as text.

        Args:
            text: Of a row without images.
            names: The row's columns.
            told: Whose text it is, for the error.

        Raises:
            McaError: Nothing says which column has images.
        """
        if not self._has_vision or IMAGE_TAG not in text or _CLOSING_TAG in text:
            return
        if not self._is_named and names.isdisjoint(self._columns):
            raise McaError(
                f"{told} has {IMAGE_TAG}, the placeholder of an image, but the rows have no column "
                f"{' or '.join(self._columns)}; set images_column to the column with the images; if {IMAGE_TAG} is "
                "plain text, set images_column to the image column of other rows, or to any unused name"
            )
        if not self._has_warned:
            logger.warning(
                "%s in the text of a row without an image in %s is trained as text; this is reported once",
                IMAGE_TAG,
                " or ".join(self._columns),
            )
            self._has_warned = True
