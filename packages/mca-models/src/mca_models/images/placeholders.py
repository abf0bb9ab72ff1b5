"""Which tokens stand for images and videos in a text, as ``config.json`` says it."""

from mca_config.types import Values


def placeholders(vision: Values | None) -> dict[str, int]:
    """The placeholder of each medium.

    Args:
        vision: Of a model's configuration; None: it sees nothing.
    """
    known = vision or {}
    found: dict[str, int] = {}
    for medium in ("image", "video"):
        for key in (f"{medium}_token_id", f"{medium}_token_index"):
            if known.get(key) is not None:
                found.setdefault(medium, int(known[key]))
    return found
