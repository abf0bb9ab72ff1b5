"""Images that are cut into tiles of different numbers: their places in rows, and transformers' inputs for them."""

import torch

from mca_models.media import ImageSpan, tile_order

JOINED = ("llava_next", "llava_onevision")
"""Begins the names of cases whose images are tiles, joined without their padding."""
JOINED_ROWS: tuple[tuple[tuple[int, tuple[int, int]], ...], ...] = (
    ((1, (16, 16)), (12, (16, 16))),
    (),
    ((5, (16, 32)),),
    (),
)
"""Each row's images of such cases: where they begin, and their height and width."""
JOINED_TOKENS = {(16, 16): (2, 10), (16, 32): (5, 14)}
"""Tiles and tokens of the two sizes; the wide one fits into twice two tiles, half of which is padding."""
MARKED = "ovis2"
"""Begins the names of cases whose images have marks between tiles, which have features too."""
MARKED_ROWS: tuple[tuple[tuple[int, tuple[int, int]], ...], ...] = (
    ((0, (1, 1)), (8, (1, 2))),
    (),
    ((5, (2, 1)),),
    (),
)
"""Each row's images of such cases: where they begin, and the rows and columns of their tiles."""
MARKS = (66, 67, 68, 69, 64)
IMAGE = 65
CASES = (*JOINED, MARKED)
"""Begin the names of all cases that are here."""


def places(case: str) -> tuple[tuple[ImageSpan, ...], ...]:
    """Return the locations of the images of each row."""
    if case.startswith(MARKED):
        return tuple(
            tuple(ImageSpan(start, 1, len(_marked_tokens(grid))) for start, grid in row)
            for row in MARKED_ROWS
        )
    return tuple(
        tuple(ImageSpan(start, 1, _joined_tokens(case, size, len(row))) for start, size in row)
        for row in JOINED_ROWS
    )


def pixels(case: str, number: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return transformers' inputs for the images of row ``number``."""
    if case.startswith(MARKED):
        grids = [grid for _, grid in MARKED_ROWS[number]]
        tiles = sum(tile_order(*grid).count(None) for grid in grids)
        return {
            "pixel_values": torch.randn(tiles, 3, 16, 16, generator=generator),
            "grids": torch.tensor(grids),
        }
    found = joined_tiles([size for _, size in JOINED_ROWS[number]], generator)
    if not case.startswith("llava_onevision"):
        return found
    return {**found, "batch_num_images": torch.tensor([len(JOINED_ROWS[number])] * len(JOINED_ROWS[number]))}


def write_tokens(ids: torch.Tensor, number: int) -> None:
    """Write the tokens of images with marks into row ``number``."""
    for start, grid in MARKED_ROWS[number]:
        own = torch.tensor(_marked_tokens(grid))
        ids[start : start + len(own)] = own


def _marked_tokens(grid: tuple[int, int]) -> list[int]:
    """Return the tokens of an image of Ovis 2, whose tiles have four."""
    return [token for mark in tile_order(*grid) for token in ([IMAGE] * 4 if mark is None else [MARKS[mark]])]


def _joined_tokens(case: str, size: tuple[int, int], images: int) -> int:
    """Return the tokens of an image of ``size`` in a row with so many ``images``."""
    if case.startswith("llava_onevision"):
        return (
            5 if images > 1 else 7
        )  # one tile, or one for a picture that is shrunk to less than one, and ends
    return JOINED_TOKENS[size][1]


def joined_tiles(sizes: list[tuple[int, int]], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return tiles of random pixels for images of these sizes."""
    counts = [JOINED_TOKENS[size][0] for size in sizes]
    tiles = torch.randn(len(sizes), max(counts), 3, 16, 16, generator=generator)
    return {"pixel_values": tiles, "image_sizes": torch.tensor(sizes)}
