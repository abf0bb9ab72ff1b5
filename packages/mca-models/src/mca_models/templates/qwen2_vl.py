"""Qwen 2 and 2.5 VL: a tower with a patch merger, and Qwen 2 with sectioned rotary positions."""

from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates import get_family
from mca_models.templates.config_table import HfConfig, head_dim
from mca_models.templates.family import Family, by_type
from mca_models.templates.lens import Lens
from mca_models.templates.parts.qwen_tower import MERGERS, VISUAL, gated_tower, gated_width, qwen2_tower
from mca_models.templates.parts.sliding_window import window, write_window
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    NestedTextConfig,
    Shapes,
    Spelling,
    VisionModel,
    linear,
    module_spelling,
    norm,
)
from mca_models.templates.parts.vision_values import vision_values

QWEN2 = get_family("qwen2")
SPELLINGS = (Spelling("model.", "lm_head.", {VISUAL: VISUAL}), module_spelling(VISUAL))
INSIDE = NestedTextConfig(text_ties="too", rope=((16, 24, 24), False))


# Qwen 2 VL: HF `Qwen2VLForConditionalGeneration`: Qwen 2 with sectioned rotary positions.
_DEFAULTS = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_window_layers": 80}


def derive(hf: HfConfig) -> JsonObject:
    """The window, and the dimension of a head, which no file chooses."""
    return {**window(hf), "kv_channels": head_dim(hf)}


def text_family() -> Family:
    """Qwen 2 as the text part."""
    fields = tuple(field for field in QWEN2.table.fields if field.hf != "head_dim")
    config = replace(QWEN2.table, fields=fields, defaults=_DEFAULTS, facts=(Lens(derive, write_window),))
    return replace(QWEN2, model_type="qwen2_vl_text", config=config)


def _qwen2_tensors(config: McaModelConfig) -> Shapes:
    _, vision = vision_values(config)
    width = vision.size("embed_dim", 1280)
    inner = int(width * vision.factor("mlp_ratio", 4))
    block = {
        **norm("norm1", width),
        **norm("norm2", width),
        **linear("attn.qkv", 3 * width, width),
        **linear("attn.proj", width, width),
        **linear("mlp.fc1", inner, width),
        **linear("mlp.fc2", width, inner),
    }
    return qwen2_tower(vision, width, block, vision.size("hidden_size", 3584), bias=True)


QWEN2_VL = vision_language_family(
    "qwen2_vl",
    "Qwen2VLForConditionalGeneration",
    {"qwen2_vl_text": text_family()},
    VisionModel(tensors=_qwen2_tensors, spellings=SPELLINGS, projector=MERGERS, video_tokens="together"),
    INSIDE,
)


# Qwen 2.5 VL: HF `Qwen2_5_VLForConditionalGeneration`: Qwen 2 VL with windows in the vision model.
TEXT = replace(QWEN2_VL.texts["qwen2_vl_text"], model_type="qwen2_5_vl_text")


def _qwen2_5_tensors(config: McaModelConfig) -> Shapes:
    _, vision = vision_values(config)
    return gated_tower(vision, {"qkv": 3 * gated_width(vision)})


QWEN2_5_VL = vision_language_family(
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    {"qwen2_5_vl_text": TEXT},
    VisionModel(
        tensors=_qwen2_5_tensors,
        spellings=SPELLINGS,
        projector=MERGERS,
        video_tokens="together",
        tokens_per_second=4,
    ),
    INSIDE,
)

FAMILIES = by_type(QWEN2_VL, QWEN2_5_VL)
