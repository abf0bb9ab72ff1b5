"""What parts of a message may be beside text. How images are read is in `image_files`."""

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
)  # of qwen-vl-utils, which no processor reads
IMAGE_KEYS = ("image", "image_url", "path", "url", "base64", "bytes")
"""Under which a part, or a mapping in a column, has its image."""


def media_type(part: object) -> str | None:
    """What a part is: ``image``, or the name of another kind that is no text; None: neither.

    Its type says so, or the key that it has its data under: chat templates look at either.
    """
    if not isinstance(part, Mapping):
        return None
    named = part.get("type")
    if named not in (*_IMAGES, *_OTHER_MEDIA):
        keys = (*_IMAGES, *_OTHER_MEDIA)
        named = next((key for key in keys if _is_set(part.get(key))), None)
    return IMAGE if named in _IMAGES else named


def _is_set(value: object) -> bool:
    """Whether a key says anything: exports that have every key in every part leave those of others empty."""
    return value is not None and not (isinstance(value, str) and not value)


def has_data(part: Mapping[str, object]) -> bool:
    """Whether a part holds its image, or says where it is."""
    return any(part.get(key) is not None for key in IMAGE_KEYS)


def require_text_or_image(part: object) -> None:
    """Refuses parts of other kinds, and those of both.

    Raises:
        McaError: It is a video or a sound, or an image with words or a size of its own.
    """
    kind = media_type(part)
    if kind not in (None, IMAGE):
        raise McaError(f"a part of a message is of type {kind}; only text and images can be used")
    if kind == IMAGE and isinstance(part, Mapping) and part.get("text"):
        raise McaError("a part of a message has an image and a text; make two parts of it")
    if kind == IMAGE and isinstance(part, Mapping):
        require_no_size(part)


def require_no_size(image: Mapping[str, object]) -> None:
    """Refuses sizes that one image of a row asks for: image processors make all images by the same rule.

    Raises:
        McaError: There is one.
    """
    if found := [key for key in _SIZES if image.get(key) is not None]:
        raise McaError(
            f"an image has {found[0]}, which the model's image processor takes for no single image; remove it, and set "
            "size in preprocessor_config.json for all, or make the file smaller"
        )


def require_no_data(content: object) -> None:
    """Refuses parts whose images nobody has taken out.

    Raises:
        McaError: There is one.
    """
    for part in content if isinstance(content, list) else ():
        require_text_or_image(part)
        if media_type(part) == IMAGE and has_data(part):
            raise McaError("a part of a message is an image; mca-train sft, dpo and kto take images")


def with_types(content: object) -> object:
    """``content`` whose parts of text say so and have no empty keys of others: chat templates may look at either."""
    return [_as_text(part) for part in content] if isinstance(content, list) else content


def _as_text(part: object) -> object:
    if not isinstance(part, dict) or media_type(part) is not None or not isinstance(part.get("text"), str):
        return part
    named = "text" if part.get("type") in _TEXTS else part.get("type")
    words = {key: value for key, value in part.items() if key not in (*_IMAGES, *_OTHER_MEDIA)}
    return {**words, "type": named}
