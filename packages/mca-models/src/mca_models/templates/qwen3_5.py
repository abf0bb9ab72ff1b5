"""Qwen 3.5 and 3.5 with experts: HF ``Qwen3_5ForConditionalGeneration`` and ``Qwen3_5MoeForConditionalGeneration``."""

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.family import Family
from mca_models.templates.parts.deepstack import MERGERS, SPELLINGS, tower
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import NestedTextConfig, Shapes, VisionModel

QWEN3_5_MOE_TEXT = get_family("qwen3_5_moe_text")
QWEN3_5_TEXT = get_family("qwen3_5_text")


def tensors(config: McaModelConfig) -> Shapes:
    """Every tensor of the vision model: that of Qwen 3 VL without deepstack."""
    return tower(config, 0)


def _family(model_type: str, architecture: str, text: Family) -> Family:
    return vision_language_family(
        model_type,
        architecture,
        {text.model_type: text},
        VisionModel(tensors=tensors, spellings=SPELLINGS, projector=MERGERS, video_tokens="timestamps"),
        NestedTextConfig(text_model_type="", rope=((11, 11, 10), True)),
    )


FAMILY = _family("qwen3_5", "Qwen3_5ForConditionalGeneration", QWEN3_5_TEXT)
MOE_FAMILY = _family("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", QWEN3_5_MOE_TEXT)
