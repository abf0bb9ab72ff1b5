"""Media parts of messages. `image_files` reads the images, and `video_files` the videos."""

from collections.abc import Mapping

from mca_config.errors import McaError

IMAGE, VIDEO = "image", "video"
MEDIA = (IMAGE, VIDEO)
"""Supported media."""
TAGS = {IMAGE: "<image>", VIDEO: "<video>"}
"""Placeholders in the text of rows with a column of a medium."""
_IMAGES = ("image", "image_url", "input_image")
_VIDEOS = ("video", "video_url", "input_video")
_OTHER_MEDIA = ("audio", "audio_url", "input_audio")
_ALL_MEDIA = (*_IMAGES, *_VIDEOS, *_OTHER_MEDIA)
_TEXTS = (None, "input_text", "output_text")
_SIZES = (
    "min_pixels",
    "max_pixels",
    "resized_height",
    "resized_width",
)  # options of qwen-vl-utils, which processors ignore
IMAGE_KEYS = ("image", "image_url", "path", "url", "base64", "bytes")
"""Keys of the image in a part, or in a mapping of a column."""
VIDEO_KEYS = ("video", "video_url", "path", "url", "base64", "bytes")
"""The same for videos."""
_VIDEO_OPTIONS = (
    *("fps", "sample_fps", "nframes", "num_frames", "min_frames", "max_frames", "video_start", "video_end"),
    *("total_pixels", *_SIZES),
)  # options of qwen-vl-utils for one video


def media_type(part: object) -> str | None:
    """Return the media type of a part: ``image``, ``video``, or an unsupported one; None: text.

    The type is given by ``type``, or by the key of the data; chat templates use either.
    """
    if not isinstance(part, Mapping):
        return None
    named = part.get("type")
    if named not in _ALL_MEDIA:
        named = next((key for key in _ALL_MEDIA if _is_set(part.get(key))), None)
    return IMAGE if named in _IMAGES else VIDEO if named in _VIDEOS else named


def _is_set(value: object) -> bool:
    """Return True unless the value is null or empty, as in exports with every key in every part."""
    return value is not None and not (isinstance(value, str) and not value)


def has_data(part: Mapping[str, object]) -> bool:
    """Return True if a part contains its image or video, or a path or URL of it."""
    return any(part.get(key) is not None for key in (*IMAGE_KEYS, *VIDEO_KEYS))


def require_supported(part: object) -> None:
    """Raise an error for unsupported parts, and for parts of media with text or options.

    Raises:
        McaError: The part is audio, or an image or video with text or its own options.
    """
    kind = media_type(part)
    if kind not in (None, *MEDIA):
        raise McaError(f"a part of a message is of type {kind}; only text, images and videos can be used")
    if kind is None or not isinstance(part, Mapping):
        return
    if part.get("text"):
        noun = "an image" if kind == IMAGE else "a video"
        raise McaError(f"a part of a message has {noun} and a text; make two parts of it")
    (require_no_size if kind == IMAGE else require_no_video_options)(part)


def require_no_video_options(video: Mapping[str, object]) -> None:
    """Raise an error for options of single videos, because a run reads all videos alike.

    Raises:
        McaError: The video has options.
    """
    if found := [key for key in _VIDEO_OPTIONS if video.get(key) is not None]:
        raise McaError(
            f"a video has {found[0]}, which mca does not support per video; remove it, and set video_fps, "
            "video_max_frames, or size in video_preprocessor_config.json for all"
        )


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
    """Raise an error for image and video parts in tasks without them.

    Raises:
        McaError: There is an image or a video.
    """
    for part in content if isinstance(content, list) else ():
        require_supported(part)
        if (kind := media_type(part)) in MEDIA and isinstance(part, Mapping) and has_data(part):
            noun = "an image" if kind == IMAGE else "a video"
            raise McaError(f"a part of a message is {noun}; only mca-train sft, dpo and kto support {kind}s")


def with_types(content: object) -> object:
    """Return ``content`` with types in text parts and without null keys, for chat templates that check either."""
    return [_as_text(part) for part in content] if isinstance(content, list) else content


def _as_text(part: object) -> object:
    if not isinstance(part, dict) or media_type(part) is not None or not isinstance(part.get("text"), str):
        return part
    named = "text" if part.get("type") in _TEXTS else part.get("type")
    words = {key: value for key, value in part.items() if key not in _ALL_MEDIA}
    return {**words, "type": named}
