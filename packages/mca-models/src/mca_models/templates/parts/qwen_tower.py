"""Vision towers of the Qwen VL models: layers over patches, and mergers that make one token of several patches."""

from collections.abc import Mapping
from dataclasses import replace

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates.config_table import ConfigTable, Lens
from mca_models.templates.parts.vision_tower import (
    Shapes,
    VisionModel,
    gated_mlp,
    linear,
    module_spelling,
    norm,
    repeat_shapes,
)
from mca_models.templates.parts.vision_values import VisionValues, vision_values

VISUAL = "visual."
MERGERS = (f"{VISUAL}merger.",)


def patches(vision: VisionValues, width: int, default: int = 14) -> tuple[int, int, int, int, int]:
    """Return the shape of the convolution that makes patches; ``default``: their side if the file does not say."""
    size = vision.size("patch_size", default)
    return width, vision.size("in_channels", 3), vision.size("temporal_patch_size", 2), size, size


def qwen2_tower(vision: VisionValues, width: int, block: Shapes, out: int, *, bias: bool) -> Shapes:
    """Return the tensors of Qwen 2 VL's tower.

    Args:
        vision: Configuration of the tower.
        width: Hidden size.
        block: Tensors of a layer.
        out: Hidden size of the text model.
        bias: The norm of the merger has a bias.
    """
    merged = width * vision.size("spatial_merge_size", 2) ** 2
    return {
        f"{VISUAL}patch_embed.proj.weight": patches(vision, width),
        **repeat_shapes(f"{VISUAL}blocks", vision.layers("depth", 32), block),
        **norm(f"{VISUAL}merger.ln_q", width, bias=bias),
        **linear(f"{VISUAL}merger.mlp.0", merged, merged),
        **linear(f"{VISUAL}merger.mlp.2", out, merged),
    }


def gated_width(vision: VisionValues) -> int:
    """Return the hidden size of Qwen 2.5 VL's tower."""
    return vision.size("hidden_size", 3584)


def gated_tower(vision: VisionValues, projections: Mapping[str, int]) -> Shapes:
    """Return the tensors of Qwen 2.5 VL's tower, whose layers have gated MLPs.

    Args:
        vision: Configuration of the tower.
        projections: Rows of the input projections of attention, by their names.
    """
    width = gated_width(vision)
    block = {**norm("norm1", width, bias=False), **norm("norm2", width, bias=False)}
    for name, rows in {**projections, "proj": width}.items():
        block |= linear(f"attn.{name}", rows, width)
    block |= gated_mlp("mlp.", vision.size("intermediate_size", 3420), width)
    return qwen2_tower(vision, width, block, vision.size("out_hidden_size", 3584), bias=False)


def deepstack_layers(vision: JsonObject) -> int:
    """Return the number of inner layers of Qwen 3 VL's tower that give features to decoder layers."""
    indexes = VisionValues(vision, "vision_config.").indexes("deepstack_visual_indexes", (8, 16, 24))
    return len(indexes)


def deepstack_tower(config: McaModelConfig) -> Shapes:
    """Return the tensors of Qwen 3 VL's tower, with a merger for each inner layer that gives features."""
    _, vision = vision_values(config)
    width, inner = vision.size("hidden_size", 1152), vision.size("intermediate_size", 4304)
    out, merged = vision.size("out_hidden_size", 3584), width * vision.size("spatial_merge_size", 2) ** 2
    block = {
        **norm("norm1", width),
        **norm("norm2", width),
        **linear("attn.qkv", 3 * width, width),
        **linear("attn.proj", width, width),
        **linear("mlp.linear_fc1", inner, width),
        **linear("mlp.linear_fc2", width, inner),
    }
    mlp = {**linear("linear_fc1", merged, merged), **linear("linear_fc2", out, merged)}
    merger = {**norm("norm", width), **mlp}
    inner_merger = {**norm("norm", merged), **mlp}
    count = given(config.vision).deepstack_layers
    return {
        f"{VISUAL}patch_embed.proj.weight": patches(vision, width, 16),
        f"{VISUAL}patch_embed.proj.bias": (width,),
        f"{VISUAL}pos_embed.weight": (vision.size("num_position_embeddings", 2304), width),
        **repeat_shapes(f"{VISUAL}blocks", vision.layers("depth", 27), block),
        **{f"{VISUAL}merger.{name}": shape for name, shape in merger.items()},
        **repeat_shapes(f"{VISUAL}deepstack_merger_list", count, inner_merger),
    }


DEEPSTACK = VisionModel(
    tensors=deepstack_tower,
    spellings=(module_spelling(VISUAL),),
    projector=(*MERGERS, f"{VISUAL}deepstack_merger_list."),
    video_tokens="timestamps",
)
"""Vision model of Qwen 3 VL."""


def without_window(config: ConfigTable) -> ConfigTable:
    """Return the table of a text part without sliding windows, which the file may have."""
    return replace(config, facts=(*config.facts, Lens(lambda hf: {"window_size": None, "layer_types": None})))
