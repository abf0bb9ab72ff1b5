"""Qwen 3 VL: HF ``Qwen3VLForConditionalGeneration``: Qwen 3 with interleaved rotary positions and deepstack."""

from dataclasses import replace

from mca_models.templates import get_family
from mca_models.templates.family import Family
from mca_models.templates.parts.deepstack import INSIDE, MERGERS, SPELLINGS, tensors, without_window
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    VisionModel,
)

QWEN3 = get_family("qwen3")


def text_family() -> Family:
    """Qwen 3 as the text part."""
    config = replace(
        without_window(QWEN3.table), defaults={"head_dim": 128, "rope_theta": 5e5, "num_key_value_heads": 32}
    )
    return replace(QWEN3, model_type="qwen3_vl_text", config=config)


FAMILY = vision_language_family(
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    {"qwen3_vl_text": text_family()},
    VisionModel(tensors=tensors, spellings=SPELLINGS, projector=MERGERS, video_tokens="timestamps"),
    INSIDE,
)
