"""What parts of a message may be beside text. How images are read is in `image_files`."""

from collections.abc import Mapping

from mca_config.errors import McaError

IMAGES = ("image", "image_url")
"""Types of parts that are images."""
_OTHERS = ("video", "video_url", "audio", "input_audio", "audio_url")
KEYS = ("image", "image_url", "path", "url", "base64", "bytes")
"""Under which a part, or a mapping in a column, has its image."""


def has_data(part: Mapping[str, object]) -> bool:
    """Whether a part holds its image, or says where it is."""
    return any(part.get(key) is not None for key in KEYS)


def require_text_or_image(part: object) -> None:
    """Refuses parts of other kinds.

    Raises:
        McaError: It is a video or a sound.
    """
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _OTHERS:
        raise McaError(f"a part of a message is a {kind}; only text and images can be used")


def require_no_data(content: object) -> None:
    """Refuses parts whose images nobody has taken out.

    Raises:
        McaError: There is one.
    """
    for part in content if isinstance(content, list) else ():
        require_text_or_image(part)
        if isinstance(part, dict) and part.get("type") in IMAGES and has_data(part):
            raise McaError("a part of a message is an image; mca-train sft, dpo and kto take images")
