"""Llama 4: HF ``Llama4ForConditionalGeneration``: a tower with a class token and pixel shuffle, and the text model."""

from functools import partial

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    PROJECTOR,
    NestedTextConfig,
    Shapes,
    VisionModel,
    linear,
    llava_spelling,
    norm,
    repeat_shapes,
)
from mca_models.templates.parts.vision_values import vision_values

_TOWER = "vision_model."
_linear = partial(linear, bias=False)


def tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of tower and projector."""
    _, vision = vision_values(config)
    width, inner = vision.size("hidden_size", 768), vision.size("intermediate_size", 5632)
    patch, between = vision.size("patch_size", 14), vision.size("projector_input_dim", 4096)
    out = vision.size("projector_output_dim", 4096)
    layer = {
        **norm("input_layernorm", width),
        **norm("post_attention_layernorm", width),
        **linear("mlp.fc1", inner, width),
        **linear("mlp.fc2", width, inner),
    }
    for x in "qkvo":
        layer |= linear(f"self_attn.{x}_proj", width, width)
    tower = {
        "class_embedding": (width,),
        "positional_embedding_vlm": ((vision.size("image_size", 448) // patch) ** 2 + 1, width),
        **_linear("patch_embedding.linear", width, vision.size("num_channels", 3) * patch**2),
        **norm("layernorm_pre", width),
        **norm("layernorm_post", width),
        **repeat_shapes("model.layers", vision.layers("num_hidden_layers", 34), layer),
        **_linear("vision_adapter.mlp.fc1", between, inner),
        **_linear("vision_adapter.mlp.fc2", out, out),
    }
    return {
        **{_TOWER + name: shape for name, shape in tower.items()},
        **_linear(f"{PROJECTOR}linear_1", config.hidden_size, vision.size("vision_output_dim", 7680)),
    }


def tokens_per_image(config: McaModelConfig) -> int:
    """Return the features of a tile: its patches, shuffled into fewer."""
    _, vision = vision_values(config)
    side = vision.size("image_size", 448) // vision.size("patch_size", 14)
    return int(side * vision.factor("pixel_shuffle_ratio", 0.5)) ** 2


FAMILY = vision_language_family(
    "llama4",
    "Llama4ForConditionalGeneration",
    {"llama4_text": get_family("llama4_text")},
    VisionModel(
        tensors=tensors,
        spellings=(llava_spelling(_TOWER, PROJECTOR),),
        projector=(PROJECTOR,),
        image_tokens="tile_rows",
        tokens_per_image=tokens_per_image,
    ),
    NestedTextConfig(text_model_type="", text_ties="alone"),
)
