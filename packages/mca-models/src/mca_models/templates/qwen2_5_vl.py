"""Qwen 2.5 VL: HF ``Qwen2_5_VLForConditionalGeneration``: Qwen 2 VL with windows in the vision model."""

from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts.patch_merger import INSIDE, MERGERS, SPELLINGS, VISUAL, merger, patches
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import Shapes, VisionModel, linear, norm, repeat_shapes
from mca_models.templates.parts.vision_values import vision_values

TEXT = replace(get_family("qwen2_vl").texts["qwen2_vl_text"], model_type="qwen2_5_vl_text")


def tensors(config: McaModelConfig) -> Shapes:
    """Every tensor of the vision model."""
    _, vision = vision_values(config)
    width, inner = vision.size("hidden_size", 3584), vision.size("intermediate_size", 3420)
    block = {
        **norm("norm1", width, bias=False),
        **norm("norm2", width, bias=False),
        **linear("attn.qkv", 3 * width, width),
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
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    {"qwen2_5_vl_text": TEXT},
    VisionModel(
        tensors=tensors, spellings=SPELLINGS, projector=MERGERS, video_tokens="together", tokens_per_second=4
    ),
    INSIDE,
)
