"""Media parts of messages. `image_files` reads the images."""

from collections.abc import Mapping

from mca_config.errors import McaError

IMAGE = "image"
_IMAGES = ("image", "image_url", "input_image")
_OTHER_MEDIA = ("video", "video_url", "audio", "audio_url", "input_audio")
_TEXTS = (None, "input_text", "output_text")
_SIZES = (
    "min_pixels",
    "max_pixels",
    "resized_height",
    "resized_width",
)  # options of qwen-vl-utils, which processors ignore
IMAGE_KEYS = ("image", "image_url", "path", "url", "base64", "bytes")
"""Keys of the image in a part, or in a mapping of a column."""


def media_type(part: object) -> str | None:
    """Return the media type of a part: ``image``, or an unsupported one; None: text.

    The type is given by ``type``, or by the key of the data; chat templates use either.
    """
    if not isinstance(part, Mapping):
        return None
    named = part.get("type")
    if named not in (*_IMAGES, *_OTHER_MEDIA):
        keys = (*_IMAGES, *_OTHER_MEDIA)
        named = next((key for key in keys if _is_set(part.get(key))), None)
    return IMAGE if named in _IMAGES else named


def _is_set(value: object) -> bool:
    """Return True unless the value is null or empty, as in exports with every key in every part."""
    return value is not None and not (isinstance(value, str) and not value)


def has_data(part: Mapping[str, object]) -> bool:
    """Return True if a part contains its image, or a path or URL of it."""
    return any(part.get(key) is not None for key in IMAGE_KEYS)


def require_text_or_image(part: object) -> None:
    """Raise an error for unsupported parts, and for image parts with text or sizes.

    Raises:
        McaError: The part is a video or audio, or an image with text or a size.
    """
    kind = media_type(part)
    if kind not in (None, IMAGE):
        raise McaError(f"a part of a message is of type {kind}; only text and images can be used")
    if kind == IMAGE and isinstance(part, Mapping) and part.get("text"):
        raise McaError("a part of a message has an image and a text; make two parts of it")
    if kind == IMAGE and isinstance(part, Mapping):
        require_no_size(part)


def require_no_size(image: Mapping[str, object]) -> None:
    """Raise an error for sizes of single images, because image processors use one size for all images.

    Raises:
        McaError: The image has a size.
    """
    if found := [key for key in _SIZES if image.get(key) is not None]:
        raise McaError(
            f"an image has {found[0]}, which the model's image processor does not support per image; remove it, and "
            "set "
            "size in preprocessor_config.json for all, or make the file smaller"
        )


def require_no_data(content: object) -> None:
    """Raise an error for image parts in tasks without images.

    Raises:
        McaError: There is an image.
    """
    for part in content if isinstance(content, list) else ():
        require_text_or_image(part)
        if media_type(part) == IMAGE and has_data(part):
            raise McaError("a part of a message is an image; only mca-train sft, dpo and kto support images")


def with_types(content: object) -> object:
    """Return ``content`` with types in text parts and without null keys, for chat templates that check either."""
    return [_as_text(part) for part in content] if isinstance(content, list) else content


def _as_text(part: object) -> object:
    if not isinstance(part, dict) or media_type(part) is not None or not isinstance(part.get("text"), str):
        return part
    named = "text" if part.get("type") in _TEXTS else part.get("type")
    words = {key: value for key, value in part.items() if key not in (*_IMAGES, *_OTHER_MEDIA)}
    return {**words, "type": named}
