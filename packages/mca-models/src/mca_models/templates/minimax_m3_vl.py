"""MiniMax M3: HF ``MiniMaxM3SparseForConditionalGeneration``: a tower of CLIP's layers and the text model."""

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    PROJECTOR,
    TOWER,
    NestedTextConfig,
    Shapes,
    Spelling,
    VisionModel,
    linear,
    module_spelling,
    norm,
    repeat_shapes,
)
from mca_models.templates.parts.vision_values import vision_values

MINIMAX_M3_VL_TEXT = get_family("minimax_m3_vl_text")

_INNER = f"{TOWER}vision_model."
PUBLISHED = Spelling(
    "language_model.model.",
    "language_model.lm_head.",
    {
        f"{TOWER}embeddings.proj.": f"{_INNER}embeddings.patch_embedding.",
        f"{TOWER}layers.": f"{_INNER}encoder.layers.",
        f"{TOWER}pre_layrnorm.": f"{_INNER}pre_layrnorm.",
        f"{PROJECTOR}merge_": "patch_merge_mlp.",
        PROJECTOR: PROJECTOR,
    },
)


def tensors(config: McaModelConfig) -> Shapes:
    """Every tensor of tower and projector."""
    about, vision = vision_values(config)
    width, inner = vision.size("hidden_size", 1280), vision.size("intermediate_size", 5120)
    size, times = vision.size("patch_size", 14), vision.size("temporal_patch_size", 2)
    between, merged = about.size("projector_hidden_size", 6144), vision.size("spatial_merge_size", 2) ** 2
    layer = {
        **norm("layer_norm1", width),
        **norm("layer_norm2", width),
        **linear("mlp.fc1", inner, width),
        **linear("mlp.fc2", width, inner),
    }
    for x in ("q", "k", "v", "out"):
        layer |= linear(f"self_attn.{x}_proj", width, width)
    return {
        f"{TOWER}embeddings.proj.weight": (width, vision.size("num_channels", 3), times, size, size),
        **norm(f"{TOWER}pre_layrnorm", width),
        **repeat_shapes(f"{TOWER}layers", vision.layers("num_hidden_layers", 32), layer),
        **linear(f"{PROJECTOR}linear_1", between, width),
        **linear(f"{PROJECTOR}linear_2", config.hidden_size, between),
        **linear(f"{PROJECTOR}merge_linear_1", between, config.hidden_size * merged),
        **linear(f"{PROJECTOR}merge_linear_2", config.hidden_size, between),
    }


FAMILY = vision_language_family(
    "minimax_m3_vl",
    "MiniMaxM3SparseForConditionalGeneration",
    {"minimax_m3_vl_text": MINIMAX_M3_VL_TEXT},
    VisionModel(
        tensors=tensors,
        spellings=(PUBLISHED, module_spelling(TOWER, PROJECTOR)),
        projector=(PROJECTOR,),
        image_tokens=None,
    ),
    NestedTextConfig(text_model_type="", text_ties="too"),
)
