"""Grid of a medium: the tokens of an image or a video, in rows, columns and frames."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Grid:
    """Tokens of one image or video.

    Args:
        rows: Rows of placeholders, of a video in each frame; for tiles, the number of tiles.
        columns: Columns of placeholders; for tiles, the placeholders of each.
        frames: Frames of a video after patches are merged; 0: an image.
        interval: Time positions from one frame of a video to the next.
        times: Seconds of the frames, which some families write in front of them; known while a row is read.
        tile_rows: Rows of the tiles of an image, for families with marks between tiles.
    """

    rows: int
    columns: int
    frames: int = 0
    interval: float = 1.0
    times: tuple[float, ...] = field(default=(), compare=False)
    tile_rows: int = 1

    @property
    def medium(self) -> str:
        """Return ``video`` or ``image``."""
        return "video" if self.frames else "image"

    @property
    def tokens(self) -> int:
        """Number of placeholders."""
        return max(self.frames, 1) * self.rows * self.columns

    @property
    def numbers(self) -> list[float]:
        """Return the numbers from which ``from_numbers`` restores the grid, without ``times``."""
        return [self.rows, self.columns, self.frames, self.interval, self.tile_rows]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> "Grid":
        """Return the grid with these ``numbers``."""
        rows, columns, frames, interval, tile_rows = numbers
        return cls(int(rows), int(columns), int(frames), float(interval), tile_rows=int(tile_rows))

    def __str__(self) -> str:
        sides = (self.frames, self.rows, self.columns) if self.frames else (self.rows, self.columns)
        return " x ".join(map(str, sides))
