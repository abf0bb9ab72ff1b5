"""Grid of a medium: the tokens of an image, a video or an audio clip, in rows, columns and frames."""

from collections.abc import Sequence
from dataclasses import dataclass, field

_AUDIO = -1


@dataclass(frozen=True)
class Grid:
    """Tokens of one image, video or audio clip.

    Args:
        rows: Rows of placeholders, of a video in each frame; for tiles, the number of tiles.
        columns: Columns of placeholders; for tiles, the placeholders of each.
        frames: Frames of a video after patches are merged; 0: an image; -1: an audio clip.
        interval: Time positions from one frame of a video to the next.
        times: Seconds of the frames, which some families write in front of them; known while a row is read.
        tile_rows: Rows of the tiles of an image, for families with marks between tiles.
        tile_columns: Columns of its tiles; known while a row is read.
        tile_tokens: Placeholders of a tile next to a whole image of others; known while a row is read.
        sound: Placeholders of the sound of a video, between those of its frames.
        number: Number among the images of its sequence, its videos, or its clips.
    """

    rows: int
    columns: int
    frames: int = 0
    interval: float = 1.0
    times: tuple[float, ...] = field(default=(), compare=False)
    tile_rows: int = 1
    tile_columns: int = field(default=1, compare=False)
    tile_tokens: int = field(default=0, compare=False)
    sound: int = 0
    number: int = field(default=0, compare=False)

    @property
    def medium(self) -> str:
        """Return ``image``, ``video`` or ``audio``."""
        return {0: "image", _AUDIO: "audio"}.get(self.frames, "video")

    @property
    def tokens(self) -> int:
        """Number of placeholders."""
        return max(self.frames, 1) * self.rows * self.columns + self.sound

    @property
    def numbers(self) -> list[float]:
        """Return the numbers from which ``from_numbers`` restores the grid, without what only a row knows."""
        return [self.rows, self.columns, self.frames, self.interval, self.tile_rows, self.sound, self.number]

    @classmethod
    def audio(cls, tokens: int) -> "Grid":
        """Return the grid of an audio clip."""
        return cls(1, tokens, _AUDIO)

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> "Grid":
        """Return the grid with these ``numbers``."""
        rows, columns, frames, interval, *others = numbers
        tile_rows, sound, number = map(int, others)
        size = (int(rows), int(columns), int(frames), float(interval))
        return cls(*size, tile_rows=tile_rows, sound=sound, number=number)

    def __str__(self) -> str:
        sides = (self.frames, self.rows, self.columns) if self.frames > 0 else (self.rows, self.columns)
        return " x ".join(map(str, sides)) + (f" and {self.sound} of sound" if self.sound else "")
