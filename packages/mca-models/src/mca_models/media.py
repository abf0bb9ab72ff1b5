"""The positions of tokens in a sequence with images and videos, as models with sectioned rotary positions count them.

A token of text has one position three times. The tokens of an image have the image's own place in time, their row and
their column, all counted from where the image begins; the text after it goes on behind its longer side. The frames of a
video follow one another in time, and the text after it goes on behind the longer side of a frame.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from mca_config.types import Values
from mca_models.weights.arrays import NumpyArray

MEDIA = ("image", "video", "audio")
"""Media that tokens may be placeholders of."""


@dataclass(frozen=True)
class ImageSpan:
    """One image among tokens, one video without text between its frames, one audio clip, or a run of one of both.

    Args:
        start: Its first placeholder.
        rows: Rows of tokens, after patches are merged.
        columns: Columns of tokens.
        frames: Frames of a video, after they are merged.
        interval: Time positions from one frame to the next, or seconds; a frame's own position is rounded down.
        per_second: Time positions of one second, where ``interval`` is in seconds.
        past_time: The text after it also starts after the time of its last frame.
        exact: Time positions are not rounded down.
        medium: ``image`` for what the vision tower computes, or ``audio``.
        run: First and one past the last of its tokens that follow one another here; None: all. The runs of a video
            and its sound follow one another, and their positions count from one place.
        origin: Start of the first of these runs; None: it is no run.
        shared_marks: The two tokens before the first run have one position, and so have the two behind the last.
    """

    start: int
    rows: int
    columns: int
    frames: int = 1
    interval: float = 1.0
    per_second: float = 1.0
    past_time: bool = False
    exact: bool = False
    medium: Literal["image", "audio"] = "image"
    run: tuple[int, int] | None = None
    origin: int | None = None
    shared_marks: bool = False

    @property
    def tokens(self) -> int:
        """Its placeholders, which follow one another."""
        first, stop = self.run or (0, self.frames * self.rows * self.columns)
        return stop - first


def positions(length: int, images: Sequence[ImageSpan]) -> NumpyArray:
    """``[3, length]`` int64: time, row and column of each token; fp32 with exact times.

    Args:
        length: Tokens of the sequence.
        images: Images in the sequence, in order; the tokens of audio count as text, except those of a video's sound.
    """
    import numpy as np

    exact = any(image.exact and image.frames > 1 for image in images)
    found = np.empty((3, length), np.float32 if exact else np.int64)
    token, position = 0, found.dtype.type(0)
    base, shared = position, False
    for image in (each for each in images if each.medium == "image" or each.origin is not None):
        if image.origin in (None, image.start):
            position = _fill_text(found, token, image.start, position, shared=shared)
            shared = image.shared_marks
            if shared:  # the second mark has the position of the first
                position -= 1
                found[:, image.start - 1] = position - 1
            base = position
        token = image.start + image.tokens
        found[:, image.start : token] = _inner_positions(image).astype(found.dtype) + base
        if image.origin is not None:
            position = found[:, image.start : token].max() + 1
        else:
            last = found[:, token - 1].max() + 1 if image.past_time else 0
            position = max(base + max(image.rows, image.columns), last)
    _fill_text(found, token, length, position, shared=shared)
    return found


def _fill_text(found: NumpyArray, token: int, stop: int, position: NumpyArray, *, shared: bool) -> NumpyArray:
    """Write the positions of text from ``token`` to ``stop``, and return the next one; ``shared``: two begin it."""
    import numpy as np

    if shared and token < stop:
        found[:, token] = position
        token += 1
    found[:, token:stop] = np.arange(stop - token) + position
    return position + (stop - token)


def _inner_positions(image: ImageSpan) -> NumpyArray:
    """Return time, row and column of the tokens of ``image``, from the first of all its tokens on."""
    import numpy as np

    first = image.run[0] if image.run else 0
    inside = np.arange(first, first + image.tokens)
    if image.medium == "audio":
        return np.stack([inside] * 3)
    frame, in_frame = np.divmod(inside, image.rows * image.columns)
    times = frame.astype(np.float32) * np.float32(image.interval)  # fp32, as in transformers
    times *= np.float32(image.per_second)
    if not image.exact:
        times = np.floor(times)
    return np.stack((times, in_frame // image.columns, in_frame % image.columns))


def feature_rows(length: int, images: Sequence[ImageSpan], first: int = 0) -> NumpyArray:
    """``[length]`` int64: of which row of the features a token is the placeholder, or -1.

    Args:
        length: Tokens of the sequence.
        images: Images in the sequence, in the order of their features.
        first: The row of the first image's first feature: how many the images before it in the micro-batch have.
    """
    import numpy as np

    found = np.full(length, -1, np.int64)
    for image in images:
        found[image.start : image.start + image.tokens] = np.arange(image.tokens) + first
        first += image.tokens
    return found


def batch_feature_rows(lengths: Sequence[int], sequences: Sequence[Sequence[ImageSpan]]) -> list[NumpyArray]:
    """Return `feature_rows` of each sequence of a micro-batch, whose images' features are before those of its clips.

    Args:
        lengths: Tokens of each sequence.
        sequences: Images and clips of each, in the order of their tokens.
    """
    found: list[NumpyArray] = [feature_rows(length, ()) for length in lengths]
    first = 0
    for medium in ("image", "audio"):
        for number, images in enumerate(sequences):
            own = [image for image in images if image.medium == medium]
            found[number] = found[number].clip(min=feature_rows(lengths[number], own, first))
            first += sum(image.tokens for image in own)
    return found


def attention_ends(length: int, images: Sequence[ImageSpan]) -> NumpyArray:
    """``[length]`` int64: how many tokens there are up to the last that a token sees, where images see both ways.

    Args:
        length: Tokens of the sequence.
        images: Images in the sequence.
    """
    import numpy as np

    found = np.arange(1, length + 1)
    for image in _pictures(images):
        end = image.start + image.tokens
        found[image.start : end] = end
    return found


def _pictures(images: Sequence[ImageSpan]) -> Iterator[ImageSpan]:
    return (image for image in images if image.medium == "image")


def placeholders(vision: Values | None) -> dict[str, int]:
    """The placeholder of each medium.

    Args:
        vision: Fields of the vision section of a configuration; None: the model takes no media.
    """
    known = vision or {}
    found: dict[str, int] = {}
    for medium in MEDIA:
        for key in (f"{medium}_token_id", f"{medium}_token_index"):
            if known.get(key) is not None:
                found.setdefault(medium, int(known[key]))
    return found


def tile_order(rows: int, columns: int) -> list[int | None]:
    """Return the marks of an image of ``rows`` times ``columns`` tiles, and None for each tile.

    The whole image comes first, and alone if it is not cut. Mark 0 is before it, 1 behind it, 2 between columns, 3
    between rows, and 4 at the end.
    """
    order: list[int | None] = [0, None, 1]
    if rows * columns > 1:
        tiles = [(row, column) for row in range(rows) for column in range(columns)]
        order += [None]
        for _, column in tiles[1:]:
            order += [2 if column else 3, None]
    return [*order, 4]
