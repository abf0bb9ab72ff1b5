"""Placement of a row's images, videos and audio clips in its messages.

Parts of messages     {"type": "image", "image" | "path" | "url" | "base64" | "bytes": ...}, {"type": "image_url"}, or
                      {"image": ...} without a type; the same with video and audio
A column of images    replaces {"type": "image"} without data, or <image> in text; without any placeholder, the images
                      precede the first turn of the user; the same with columns of videos and audio
Neither               <image> is plain text
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from mca_config.errors import McaError
from mca_config.printable import counted
from mca_config.types import JsonObject
from mca_train.data.audio_files import AudioFile
from mca_train.data.image_files import ImageFile, open_image
from mca_train.data.message_parts import (
    AUDIO,
    IMAGE,
    MEDIA,
    TAGS,
    has_data,
    media_type,
    require_no_unread_keys,
    require_supported,
)
from mca_train.data.row_paths import RowPaths
from mca_train.data.video_files import Video, open_video

MediaFile = ImageFile | Video | AudioFile
"""Image, video or audio clip of a row."""


class MediaPlacer:
    """Assigns the images and videos of a row to the placeholders in its messages.

    Args:
        columns: Images and videos of the row's columns, by medium. If there are any, the medium's tag in text is a
            placeholder.
        open_file: Function from a medium and a value in the row to the file.
        on_plain_tag: Callback for a user's text with the tag of a medium that the row's columns do not have.
        typed: Media with parts without data, which are the placeholders: their tags in text parts are text.
    """

    def __init__(
        self,
        columns: Mapping[str, Sequence[object]],
        open_file: Callable[[str, object], MediaFile],
        *,
        on_plain_tag: Callable[[str], None],
        typed: Collection[str] = (),
    ) -> None:
        self._typed = typed
        self._columns = {medium: list(columns.get(medium, ())) for medium in MEDIA}
        self._open, self._on_plain_tag = open_file, on_plain_tag
        self._next = dict.fromkeys(MEDIA, 0)
        self._num_placeholders = dict.fromkeys(MEDIA, 0)
        self._tags = {TAGS[medium]: medium for medium, found in self._columns.items() if found}
        self.files: list[MediaFile] = []

    def turn(self, turn: object) -> object:
        """Return a turn with parts of media without data, and collect its files.

        Raises:
            McaError: The turn has invalid media.
        """
        if not isinstance(turn, dict):
            return turn
        content = turn.get("content")
        if isinstance(content, str):
            plain = [tag for tag in TAGS.values() if tag in content and tag not in self._tags]
            if plain and turn.get("role") == "user":
                self._on_plain_tag(content)
            if any(tag in content for tag in self._tags):
                return {**turn, "content": list(self._split_text(content, self._tags))}
        if isinstance(content, list):
            return {**turn, "content": [new for part in content for new in self._parts(part)]}
        return turn

    def _split_text(self, text: str, tags: Mapping[str, str]) -> Iterator[JsonObject]:
        for piece in re.split(f"({'|'.join(map(re.escape, tags))})", text):
            if (medium := tags.get(piece)) is not None:
                self._add_next(medium)
                yield {"type": medium}
            elif piece:
                yield {"type": "text", "text": piece}

    def _parts(self, part: object) -> Iterator[object]:
        """Yield the part, or those that the tags in its text make of it."""
        text = part.get("text") if isinstance(part, dict) and media_type(part) is None else None
        tags = {tag: medium for tag, medium in self._tags.items() if medium not in self._typed}
        if isinstance(text, str) and any(tag in text for tag in tags):
            yield from self._split_text(text, tags)
        else:
            yield self._part(part)

    def _part(self, part: object) -> object:
        require_supported(part)
        medium = media_type(part)
        if not isinstance(part, dict) or medium is None:
            return part
        if has_data(part):
            self._num_placeholders[medium] += 1
            self.files.append(self._open(medium, {**part, "type": None}))
        else:
            if not self._columns[medium]:
                require_no_unread_keys(part, medium)
            self._add_next(medium)
        return {"type": medium}

    def _add_next(self, medium: str) -> None:
        self._num_placeholders[medium] += 1
        column, number = self._columns[medium], self._next[medium]
        if number < len(column):
            self.files.append(self._open(medium, column[number]))
        self._next[medium] += 1

    def require_all(self, columns: JsonObject) -> None:
        """Check that all media have placeholders; those without any are put before the user's first turn.

        Raises:
            McaError: The numbers of files and placeholders differ.
        """
        missing = [medium for medium in MEDIA if self._columns[medium] and not self._num_placeholders[medium]]
        if missing and (turn := _first_user_turn(columns)) is not None:
            content = turn["content"]
            words = content if isinstance(content, list) else [{"type": "text", "text": content}]
            own = [medium for medium in missing for _ in self._columns[medium]]
            turn["content"] = [*({"type": medium} for medium in own), *words]
            later, self.files = self.files, []
            for medium in own:
                self._add_next(medium)
            self.files += later
        for medium in MEDIA:
            require_equal_counts(self._next[medium], len(self._columns[medium]), medium)


def open_media_file(medium: str, value: object, paths: RowPaths, fps: Callable[[], float]) -> MediaFile:
    """Return the medium ``value`` of a row; see `open_video` for ``fps``."""
    if medium == AUDIO:
        return AudioFile.read(value, paths)
    return open_image(value, paths) if medium == IMAGE else open_video(value, paths, fps)


def require_equal_counts(places: int, files: int, medium: str = IMAGE) -> None:
    """Raise an error if the numbers of placeholders and files of a medium differ.

    Raises:
        McaError: The numbers differ.
    """
    if places != files:
        raise McaError(
            f"{counted(places, 'placeholder')} of {medium}s ({TAGS[medium]}, or parts of type {medium} without a "
            f"file) but {counted(files, medium)}; their numbers must be equal"
        )


def typed_media(turns: Iterable[object]) -> set[str]:
    """Return the media with parts without data in ``turns``."""
    contents = (turn.get("content") for turn in turns if isinstance(turn, dict))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return {medium for part in parts if (medium := media_type(part)) is not None and not has_data(part)}


def as_media_list(found: object) -> list[object]:
    """Return the media of a column with one, several, or none as a list."""
    if found is None or (isinstance(found, str) and not found):
        return []
    return list(found) if isinstance(found, list | tuple) else [found]


def _first_user_turn(columns: JsonObject) -> JsonObject | None:
    """Return a mutable copy of the first user turn, in place of the original."""
    for turns in columns.values():
        for number, turn in enumerate(turns):
            if isinstance(turn, dict) and turn.get("role") == "user":
                words: JsonObject = dict(turn)
                turns[number] = words
                return words
    return None
