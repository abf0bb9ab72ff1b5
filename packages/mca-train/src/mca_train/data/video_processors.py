"""Video processor of a checkpoint, and the video tokens that belong to it, by the kind that the model's family has.

The kinds themselves are in `video_tokens`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mca_config.errors import UsageError
from mca_config.model_config import McaModelConfig
from mca_models.media import placeholders
from mca_models.templates import get_family
from mca_train.data.image_processors import (
    image_processor,
    internvl_marks,
    pooled_marks,
    size_tokens,
    slice_writer,
)
from mca_train.data.image_slices import SliceTokens
from mca_train.data.image_tokens import load_processor
from mca_train.data.placeholders import media_fields
from mca_train.data.video_files import require_video_packages
from mca_train.data.video_tokens import (
    FrameImageTokens,
    NumberedFrameTokens,
    PooledFrameTokens,
    PooledVideoTokens,
    SliceVideoTokens,
    TimedVideoTokens,
    VideoOptions,
    VideoTokens,
)
from mca_train.types import ImageProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def video_tokens(
    config: McaModelConfig,
    directories: Sequence[Path],
    tokenizer: "PreTrainedTokenizerBase",
    options: VideoOptions,
) -> VideoTokens:
    """Return the video tokens of a model, whose video processor is in one of ``directories``.

    Raises:
        UsageError: The model does not support videos, a package is missing, or there is no processor.
    """
    vision = media_fields(config, tokenizer)
    part = get_family(config.model_type).vision if vision is not None else None
    if vision is None or part is None or part.video_tokens is None:
        raise UsageError(f"a {config.model_type} model does not support videos; remove them from the rows")
    token = placeholders(vision).get("video")
    if token is None:
        raise UsageError(
            f"config.json: video_token_id is missing, the placeholder of {config.model_type}"
            "; take the config.json that was published with the model"
        )
    require_video_packages()
    processor = _processor(directories)
    if part.video_tokens == "numbered":
        image, length = placeholders(vision)["image"], vision.get("image_seq_length", 256)
        own = internvl_marks(tokenizer)
        return NumberedFrameTokens(processor, image, options, own, tokenizer, length=length)
    if part.video_tokens == "pooled":
        assert part.tokens_per_frame is not None, "pooled frames have a fixed number of features"
        return PooledFrameTokens(processor, token, options, part.tokens_per_frame(config))
    if part.video_tokens == "slices":
        numbered = getattr(image_processor(directories), "use_image_id", True)  # as in transformers
        write, mode = slice_writer(tokenizer, token, numbered=numbered), vision.get("downsample_mode", "16x")
        processor.downsample_mode = mode
        return SliceVideoTokens(
            processor, options, SliceTokens(processor, token, mode, size_tokens(config), write)
        )
    if part.video_tokens == "minutes":
        return PooledVideoTokens(processor, token, options, pooled_marks(vision), tokenizer)
    if part.video_tokens in ("second_after", "seconds_after"):
        marks, whole = media_marks(config, "image"), part.video_tokens == "second_after"
        return FrameImageTokens(
            processor, placeholders(vision)["image"], options, marks, tokenizer, whole=whole
        )
    if part.video_tokens == "timestamps":
        marks = media_marks(config, "vision")
        made: VideoTokens = TimedVideoTokens(processor, token, options, marks, tokenizer)
    else:
        made = VideoTokens(processor, token, options, positions_per_second(config), part.video_rules)
    keys = (f"vision_{side}_token_id" for side in ("start", "end"))
    made.before, made.after = ([vision[key]] if key in vision else () for key in keys)
    return made


def positions_per_second(config: McaModelConfig) -> float | None:
    """Return the time positions of a second of video; None: each frame has one."""
    part, vision = get_family(config.model_type).vision, config.vision_fields or {}
    if part is None or part.tokens_per_second is None:
        return None
    if part.video_rules is not None:
        return float(vision.get("position_id_per_seconds", part.tokens_per_second))
    return float(vision.get("vision_config", {}).get("tokens_per_second", part.tokens_per_second))


def media_marks(config: McaModelConfig, medium: str) -> tuple[int, int]:
    """Return the ids of the tokens before and after a frame, or a clip."""
    vision = config.vision_fields or {}
    keys = [f"{medium}_{side}_token_id" for side in ("start", "end")]
    if missing := [key for key in keys if key not in vision]:
        raise UsageError(f"config.json: {' and '.join(missing)} of {config.model_type} is missing")
    return int(vision[keys[0]]), int(vision[keys[1]])


def _processor(directories: Sequence[Path]) -> ImageProcessor:
    from transformers.models.auto.video_processing_auto import AutoVideoProcessor

    return load_processor(
        directories, AutoVideoProcessor.from_pretrained, "rows have videos, and there is no video processor"
    )
