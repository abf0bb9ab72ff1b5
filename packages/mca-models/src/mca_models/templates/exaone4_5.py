"""EXAONE 4.5: HF ``Exaone4_5_ForConditionalGeneration``: the tower of Qwen 2.5 VL with fewer keys, and EXAONE 4."""

from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts.patch_merger import MERGERS, SPELLINGS, VISUAL, merger, patches
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    NestedTextConfig,
    Shapes,
    VisionModel,
    linear,
    norm,
    repeat_shapes,
)
from mca_models.templates.parts.vision_values import vision_values

TEXT = get_family("exaone4")


def tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of the vision model."""
    _, vision = vision_values(config)
    width, inner = vision.size("hidden_size", 3584), vision.size("intermediate_size", 3420)
    heads, groups = vision.size("num_heads", 16), vision.size("num_key_value_heads", 8)
    block = {
        **norm("norm1", width, bias=False),
        **norm("norm2", width, bias=False),
        **linear("attn.qkv", width + 2 * groups * (width // heads), width),
        **linear("attn.proj", width, width),
        **linear("mlp.gate_proj", inner, width),
        **linear("mlp.up_proj", inner, width),
        **linear("mlp.down_proj", width, inner),
    }
    merged = width * vision.size("spatial_merge_size", 2) ** 2
    return {
        f"{VISUAL}patch_embed.proj.weight": patches(vision, width),
        **repeat_shapes(f"{VISUAL}blocks", vision.layers("depth", 32), block),
        **merger(f"{VISUAL}merger", width, merged, vision.size("out_hidden_size", 3584), bias=False),
    }


FAMILY = vision_language_family(
    "exaone4_5",
    "Exaone4_5_ForConditionalGeneration",
    {"exaone4": TEXT, "exaone4_5_text": replace(TEXT, model_type="exaone4_5_text")},
    VisionModel(tensors=tensors, spellings=SPELLINGS[1:], projector=MERGERS, video_tokens="together"),
    NestedTextConfig(text_model_type="", defaults={"image_token_id": 67, "video_token_id": 68}),
    assumed=True,
)
