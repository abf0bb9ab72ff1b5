"""Mistral Small 3.1 to 4, Ministral 3: HF ``Mistral3ForConditionalGeneration``: a Pixtral tower and a text model."""

from functools import partial

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    PROJECTOR,
    TOWER,
    NestedTextConfig,
    Shapes,
    VisionModel,
    linear,
    llava_spelling,
    module_spelling,
    norm,
    repeat_shapes,
)
from mca_models.templates.parts.vision_values import vision_values

MINISTRAL3 = get_family("ministral3")
MISTRAL = get_family("mistral")
MISTRAL4 = get_family("mistral4")

_norm, _linear = partial(norm, bias=False), partial(linear, bias=False)


def tensors(config: McaModelConfig) -> Shapes:
    """Every tensor of tower and projector."""
    about, vision = vision_values(config)
    width, inner = vision.size("hidden_size", 1024), vision.size("intermediate_size", 4096)
    size, merge = vision.size("patch_size", 16), about.size("spatial_merge_size", 2)
    layer = {
        **_norm("attention_norm", width),
        **_norm("ffn_norm", width),
        **_linear("attention.q_proj", width, width),
        **_linear("attention.k_proj", width, width),
        **_linear("attention.v_proj", width, width),
        **_linear("attention.o_proj", width, width),
        **_linear("feed_forward.gate_proj", inner, width),
        **_linear("feed_forward.up_proj", inner, width),
        **_linear("feed_forward.down_proj", width, inner),
    }
    biased = about.flag("multimodal_projector_bias", False)
    taken = width * len(about.index_or_more("vision_feature_layer", -1))
    return {
        f"{TOWER}patch_conv.weight": (width, vision.size("num_channels", 3), size, size),
        **_norm(f"{TOWER}ln_pre", width),
        **repeat_shapes(f"{TOWER}transformer.layers", vision.layers("num_hidden_layers", 24), layer),
        **_norm(f"{PROJECTOR}norm", width),
        **_linear(f"{PROJECTOR}patch_merger.merging_layer", width, width * merge**2),
        **linear(f"{PROJECTOR}linear_1", config.hidden_size, taken, bias=biased),
        **linear(f"{PROJECTOR}linear_2", config.hidden_size, config.hidden_size, bias=biased),
    }


def tokens_of_size(config: McaModelConfig, height: int, width: int) -> int:
    """Return the features of an image of ``height`` times ``width`` pixels."""
    about, vision = vision_values(config)
    side = vision.size("patch_size", 16) * about.size("spatial_merge_size", 2)
    return int(height // side) * int(width // side)


FAMILY = vision_language_family(
    "mistral3",
    "Mistral3ForConditionalGeneration",
    {"mistral": MISTRAL, "ministral3": MINISTRAL3, "mistral4": MISTRAL4},
    VisionModel(
        tensors=tensors,
        spellings=(llava_spelling(TOWER, PROJECTOR), module_spelling(TOWER, PROJECTOR)),
        projector=(PROJECTOR,),
        image_tokens="lines",
        tokens_of_size=tokens_of_size,
    ),
    NestedTextConfig(text_model_type="", tied=True),
    assumed=True,
)
