"""Vision tower whose inner layers give features to decoder layers (Qwen 3 VL)."""

from dataclasses import replace

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates.config_table import ConfigTable
from mca_models.templates.lens import Lens
from mca_models.templates.parts.patch_merger import VISUAL, patches
from mca_models.templates.parts.vision_tower import (
    NestedTextConfig,
    Shapes,
    linear,
    module_spelling,
    norm,
    repeat_shapes,
)
from mca_models.templates.parts.vision_values import VisionValues, vision_values

SPELLINGS = (module_spelling(VISUAL),)


MERGERS = (f"{VISUAL}merger.", f"{VISUAL}deepstack_merger_list.")


DEEPSTACK = "deepstack_visual_indexes"


def deepstack_layers(vision: JsonObject) -> int:
    """Return the number of inner layers of the vision tower that give features."""
    return len(VisionValues(vision, "vision_config.").indexes(DEEPSTACK, (8, 16, 24)))


INSIDE = NestedTextConfig(text_model_type="", rope=((24, 20, 20), True), deepstack=deepstack_layers)


def without_window(config: ConfigTable) -> ConfigTable:
    """Return the table of a text part without sliding windows, which the file may have."""
    return replace(config, facts=(*config.facts, Lens(lambda hf: {"window_size": None, "layer_types": None})))


def merger(name: str, width: int, merged: int, out: int) -> Shapes:
    """Return a patch merger, which makes one token of several patches; its norm comes before or after."""
    return {
        **norm(f"{name}.norm", width),
        **linear(f"{name}.linear_fc1", merged, merged),
        **linear(f"{name}.linear_fc2", out, merged),
    }


def tower(config: McaModelConfig, stacked: int) -> Shapes:
    """Every tensor of the vision model, with so many inner layers that give features."""
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
    return {
        f"{VISUAL}patch_embed.proj.weight": patches(vision, width, 16),
        f"{VISUAL}patch_embed.proj.bias": (width,),
        f"{VISUAL}pos_embed.weight": (vision.size("num_position_embeddings", 2304), width),
        **repeat_shapes(f"{VISUAL}blocks", vision.layers("depth", 27), block),
        **merger(f"{VISUAL}merger", width, merged, out),
        **repeat_shapes(f"{VISUAL}deepstack_merger_list", stacked, _unnamed(merger("", merged, merged, out))),
    }


def _unnamed(shapes: Shapes) -> Shapes:
    return {name.removeprefix("."): shape for name, shape in shapes.items()}


def tensors(config: McaModelConfig) -> Shapes:
    """Every tensor of the vision model."""
    return tower(config, given(config.vision).deepstack_layers)
