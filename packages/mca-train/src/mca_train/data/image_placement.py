"""Where the images of a row belong in its messages.

Parts of messages     {"type": "image", "image" | "path" | "url" | "base64" | "bytes": ...}, {"type": "image_url"}, or
                      {"image": ...} without a type
A column of images    for each {"type": "image"} without more, or each <image> in the text of a turn; if the messages
                      have no place for any, they stand before the first words of the user
Neither               <image> is text
"""

from collections.abc import Callable, Iterator, Sequence

from mca_config.errors import McaError
from mca_config.printable import counted
from mca_config.types import JsonObject
from mca_train.data.image_files import ImageFile, image_file
from mca_train.data.image_tag import PLACE
from mca_train.data.message_parts import IMAGE, has_data, kind_of, require_text_or_image
from mca_train.data.row_paths import RowPaths


class Places:
    """Takes the images of a row as its messages ask for them.

    Args:
        given: The images of the row's column. If there is one, ``<image>`` in a text is a place for one.
        paths: The files that the row may open.
        unmarked: Called with a user's words that have ``<image>`` though there is none.
    """

    def __init__(self, given: Sequence[object], paths: RowPaths, *, unmarked: Callable[[str], None]) -> None:
        self._given, self._paths, self._unmarked = list(given), paths, unmarked
        self._next = self._asked = 0
        self.files: list[ImageFile] = []

    def turn(self, turn: object) -> object:
        """A turn whose images are parts without data; others stay.

        Raises:
            McaError: Its images cannot be told.
        """
        if not isinstance(turn, dict):
            return turn
        content = turn.get("content")
        if isinstance(content, str) and PLACE in content:
            if self._given:
                return {**turn, "content": list(self._of_text(content))}
            if turn.get("role") == "user":
                self._unmarked(content)
        if isinstance(content, list):
            return {**turn, "content": [self._part(part) for part in content]}
        return turn

    def _of_text(self, text: str) -> Iterator[JsonObject]:
        for number, piece in enumerate(text.split(PLACE)):
            if number:
                self._take()
                yield {"type": "image"}
            if piece:
                yield {"type": "text", "text": piece}

    def _part(self, part: object) -> object:
        require_text_or_image(part)
        if not isinstance(part, dict) or kind_of(part) != IMAGE:
            return part
        if has_data(part):
            self._asked += 1
            self.files.append(image_file({**part, "type": None}, self._paths))
        else:
            self._take()
        return {"type": "image"}

    def _take(self) -> None:
        self._asked += 1
        if self._next < len(self._given):
            self.files.append(image_file(self._given[self._next], self._paths))
        self._next += 1

    def require_all(self, columns: JsonObject) -> None:
        """Has all images in their places.

        Raises:
            McaError: There are more images than places, or fewer.
        """
        if self._given and not self._asked and (turn := _first_words(columns)) is not None:
            content = turn["content"]
            words = content if isinstance(content, list) else [{"type": "text", "text": content}]
            turn["content"] = [*({"type": "image"} for _ in self._given), *words]
            for _ in self._given:
                self._take()
        require_as_many(self._next, len(self._given))


def require_as_many(places: int, images: int) -> None:
    """Refuses a row with more places than images, or fewer.

    Raises:
        McaError: Their numbers differ.
    """
    if places != images:
        raise McaError(
            f"{counted(places, 'place')} for images ({PLACE}, or parts of type image) but {counted(images, 'image')}; "
            "their numbers must be equal"
        )


def listed(given: object) -> list[object]:
    """The images of a column that holds one, several, or none."""
    if given is None or (isinstance(given, str) and not given):
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def _first_words(columns: JsonObject) -> JsonObject | None:
    """The first turn of a user; it may be changed."""
    for turns in columns.values():
        for number, turn in enumerate(turns):
            if isinstance(turn, dict) and turn.get("role") == "user":
                words: JsonObject = dict(turn)
                turns[number] = words
                return words
    return None
