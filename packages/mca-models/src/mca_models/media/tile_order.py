"""Order of the tiles of an image and of the marks between them, for families whose marks have features too."""


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
