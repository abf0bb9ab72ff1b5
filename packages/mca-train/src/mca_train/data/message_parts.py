"""Media parts of messages. `image_files` reads the images, `video_files` the videos, and `audio_files` the audio."""

from collections.abc import Mapping

from mca_config.errors import McaError

IMAGE, VIDEO, AUDIO = "image", "video", "audio"
MEDIA = (IMAGE, VIDEO, AUDIO)
"""Supported media."""
NOUNS = {IMAGE: "an image", VIDEO: "a video", AUDIO: "an audio clip"}
"""Names of one of each medium in errors."""
TAGS = {IMAGE: "<image>", VIDEO: "<video>", AUDIO: "<audio>"}
"""Placeholders in the text of rows with a column of a medium."""
_IMAGES = ("image", "image_url", "input_image")
_VIDEOS = ("video", "video_url", "input_video")
_AUDIOS = ("audio", "audio_url", "input_audio")
_TYPES = {
    **dict.fromkeys(_IMAGES, IMAGE),
    **dict.fromkeys(_VIDEOS, VIDEO),
    **dict.fromkeys(_AUDIOS, AUDIO),
}
_TEXTS = (None, "input_text", "output_text")
_FILE_KEYS = ("path", "url", "base64", "bytes")
KEYS = {
    IMAGE: ("image", "image_url", *_FILE_KEYS),
    VIDEO: ("video", "video_url", *_FILE_KEYS),
    AUDIO: (*_AUDIOS, *_FILE_KEYS),
}
"""Keys of the medium in a part, or in a mapping of a column."""
_SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")  # options of qwen-vl-utils
_VIDEO_OPTIONS = (
    *("fps", "sample_fps", "nframes", "num_frames", "min_frames", "max_frames", "video_start", "video_end"),
    *("total_pixels", *_SIZES),
)  # options of qwen-vl-utils for one video
_SOUND_OPTIONS = ("use_audio_in_video", "load_audio_from_video")  # of Qwen's omni models
_AUDIO_OPTIONS = ("audio_start", "audio_end")  # the same of qwen-omni-utils
_PER_VIDEO = "which mca does not support per video; remove it, and set"
_UNSUPPORTED: Mapping[str, Mapping[tuple[str, ...], str]] = {
    IMAGE: {
        _SIZES: "which the model's image processor does not support per image; remove it, and set size in "
        "preprocessor_config.json for all, or make the file smaller"
    },
    VIDEO: {
        _SOUND_OPTIONS: f"{_PER_VIDEO} use_audio_in_video of the run for all",
        _VIDEO_OPTIONS: f"{_PER_VIDEO} video_fps, video_max_frames, or size in video_preprocessor_config.json for all",
    },
    AUDIO: {_AUDIO_OPTIONS: "which mca does not support; remove it, and cut the file instead"},
}
"""Options of single files, of which a run has one for all, with the reasons of their errors."""


def media_type(part: object) -> str | None:
    """Return the media type of a part: ``image``, ``video`` or ``audio``; None: text.

    The type is given by ``type``, or by the key of the data; chat templates use either.
    """
    if not isinstance(part, Mapping):
        return None
    named = part.get("type")
    if named not in _TYPES:
        named = next((key for key in _TYPES if _is_set(part.get(key))), None)
    return None if named is None else _TYPES[str(named)]


def _is_set(value: object) -> bool:
    """Return True unless the value is null or empty, as in exports with every key in every part."""
    return value is not None and not (isinstance(value, str) and not value)


def has_data(part: Mapping[str, object]) -> bool:
    """Return True if a part contains its medium, or a path or URL of it."""
    return any(part.get(key) is not None for keys in KEYS.values() for key in keys)


def require_supported(part: object) -> None:
    """Raise an error for parts of media with text or options.

    Raises:
        McaError: The part is an image, a video or an audio clip with text or its own options.
    """
    kind = media_type(part)
    if kind is None or not isinstance(part, Mapping):
        return
    if part.get("text"):
        raise McaError(f"a part of a message has {NOUNS[kind]} and a text; make two parts of it")
    require_no_options(part, kind)


def require_no_unread_keys(part: Mapping[str, object], kind: str) -> None:
    """Raise an error for a part of a medium whose file is in no key that is read.

    Raises:
        McaError: The part has other keys.
    """
    if unread := [str(key) for key, value in part.items() if key != "type" and _is_set(value)]:
        keys = ", ".join(KEYS[kind])
        raise McaError(
            f"a part of type {part.get('type', kind)} has {', '.join(unread)}, which is not read; put its file or data "
            f"into one of {keys}"
        )


def require_no_options(value: Mapping[str, object], kind: str) -> None:
    """Raise an error for options of a single image, video or audio clip, because a run reads all alike.

    Raises:
        McaError: There is an option.
    """
    for options, reason in _UNSUPPORTED[kind].items():
        for key in options:
            if value.get(key) is not None and value[key] is not False:
                raise McaError(f"{NOUNS[kind]} has {key}, {reason}")


def require_no_data(content: object) -> None:
    """Raise an error for parts of media in tasks without them.

    Raises:
        McaError: There is an image, a video or an audio clip.
    """
    for part in content if isinstance(content, list) else ():
        require_supported(part)
        kind = media_type(part)
        if kind is not None and isinstance(part, Mapping) and has_data(part):
            raise McaError(
                f"a part of a message is {NOUNS[kind]}, which needs a model with a tower for it; remove it"
            )


def with_types(content: object) -> object:
    """Return ``content`` with types in text parts and without null keys, for chat templates that check either."""
    return [_as_text(part) for part in content] if isinstance(content, list) else content


def _as_text(part: object) -> object:
    if not isinstance(part, dict) or media_type(part) is not None or not isinstance(part.get("text"), str):
        return part
    named = "text" if part.get("type") in _TEXTS else part.get("type")
    words = {key: value for key, value in part.items() if key not in _TYPES}
    return {**words, "type": named}
