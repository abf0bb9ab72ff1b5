"""Checks of ``<image>`` in texts of rows without images."""

import logging
from collections.abc import Set as AbstractSet

from mca_config.errors import McaError
from mca_config.types import Values
from mca_train.config.arguments import DataArguments, DefaultColumn
from mca_train.data.formats import image_columns

logger = logging.getLogger(__name__)

IMAGE_TAG = "<image>"
_CLOSING_TAG = "</image>"  # part of an XML element


class ImageTagCheck:
    """Check of texts with ``<image>`` but without images.

    Args:
        vision: Vision configuration of the model; None: a text model, without checks.
        arguments: Names of columns.
    """

    def __init__(self, vision: Values | None, arguments: DataArguments) -> None:
        self._has_vision = vision is not None
        self._columns = image_columns(vision, arguments)
        self._is_named = not isinstance(arguments.images_column, DefaultColumn)
        self._has_warned = False

    def check(self, text: str, names: AbstractSet[str], source: str) -> None:
        """Warn once that ``<image>`` in ``text`` is trained as plain text.

        Args:
            text: Text of a row without images.
            names: Columns of the row.
            source: Name of the text, for errors.

        Raises:
            McaError: No image column is set or present.
        """
        if not self._has_vision or IMAGE_TAG not in text or _CLOSING_TAG in text:
            return
        if not self._is_named and names.isdisjoint(self._columns):
            raise McaError(
                f"{source} has {IMAGE_TAG}, the placeholder of an image, but the rows have no column "
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
