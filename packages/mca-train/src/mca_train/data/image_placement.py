"""Placement of a row's images in its messages.

Parts of messages     {"type": "image", "image" | "path" | "url" | "base64" | "bytes": ...}, {"type": "image_url"}, or
                      {"image": ...} without a type
A column of images    replaces {"type": "image"} without data, and <image> in text; without any placeholder, the images
                      precede the first turn of the user
Neither               <image> is plain text
"""

from collections.abc import Callable, Iterator, Sequence

from mca_config.errors import McaError
from mca_config.printable import counted
from mca_config.types import JsonObject
from mca_train.data.image_files import ImageFile, open_image
from mca_train.data.image_tag import IMAGE_TAG
from mca_train.data.message_parts import IMAGE, has_data, media_type, require_text_or_image
from mca_train.data.row_paths import RowPaths


class ImagePlacer:
    """Assigns the images of a row to the placeholders in its messages.

    Args:
        images: Images of the row's column. If there are any, ``<image>`` in text is a placeholder.
        paths: Files that the row may open.
        on_plain_tag: Callback for a user's text with ``<image>`` in a row without images.
    """

    def __init__(
        self, images: Sequence[object], paths: RowPaths, *, on_plain_tag: Callable[[str], None]
    ) -> None:
        self._column_images, self._paths, self._on_plain_tag = list(images), paths, on_plain_tag
        self._next = self._num_placeholders = 0
        self.files: list[ImageFile] = []

    def turn(self, turn: object) -> object:
        """Return a turn with image parts without data, and collect its images.

        Raises:
            McaError: The turn has invalid images.
        """
        if not isinstance(turn, dict):
            return turn
        content = turn.get("content")
        if isinstance(content, str) and IMAGE_TAG in content:
            if self._column_images:
                return {**turn, "content": list(self._split_text(content))}
            if turn.get("role") == "user":
                self._on_plain_tag(content)
        if isinstance(content, list):
            return {**turn, "content": [self._part(part) for part in content]}
        return turn

    def _split_text(self, text: str) -> Iterator[JsonObject]:
        for number, piece in enumerate(text.split(IMAGE_TAG)):
            if number:
                self._add_next_image()
                yield {"type": "image"}
            if piece:
                yield {"type": "text", "text": piece}

    def _part(self, part: object) -> object:
        require_text_or_image(part)
        if not isinstance(part, dict) or media_type(part) != IMAGE:
            return part
        if has_data(part):
            self._num_placeholders += 1
            self.files.append(open_image({**part, "type": None}, self._paths))
        else:
            self._add_next_image()
        return {"type": "image"}

    def _add_next_image(self) -> None:
        self._num_placeholders += 1
        if self._next < len(self._column_images):
            self.files.append(open_image(self._column_images[self._next], self._paths))
        self._next += 1

    def require_all(self, columns: JsonObject) -> None:
        """Check that all images have placeholders; without any, put the images before the user's first turn.

        Raises:
            McaError: The numbers of images and placeholders differ.
        """
        if (
            self._column_images
            and not self._num_placeholders
            and (turn := _first_user_turn(columns)) is not None
        ):
            content = turn["content"]
            words = content if isinstance(content, list) else [{"type": "text", "text": content}]
            turn["content"] = [*({"type": "image"} for _ in self._column_images), *words]
            for _ in self._column_images:
                self._add_next_image()
        require_equal_counts(self._next, len(self._column_images))


def require_equal_counts(places: int, images: int) -> None:
    """Raise an error if the numbers of placeholders and images differ.

    Raises:
        McaError: The numbers differ.
    """
    if places != images:
        raise McaError(
            f"{counted(places, 'placeholder')} of images ({IMAGE_TAG}, or parts of type image) but "
            f"{counted(images, 'image')}; their numbers must be equal"
        )


def as_image_list(images: object) -> list[object]:
    """Return the images of a column with one, several, or no images as a list."""
    if images is None or (isinstance(images, str) and not images):
        return []
    return list(images) if isinstance(images, list | tuple) else [images]


def _first_user_turn(columns: JsonObject) -> JsonObject | None:
    """Return a mutable copy of the first user turn, in place of the original."""
    for turns in columns.values():
        for number, turn in enumerate(turns):
            if isinstance(turn, dict) and turn.get("role") == "user":
                words: JsonObject = dict(turn)
                turns[number] = words
                return words
    return None
