"""Gemma 3: HF ``Gemma3ForConditionalGeneration``: a SigLIP tower and the text model."""

from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.family import Family
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    PROJECTOR,
    TOWER,
    NestedTextConfig,
    Shapes,
    Spelling,
    VisionModel,
    linear,
    llava_spelling,
    module_spelling,
    norm,
    repeat_shapes,
)
from mca_models.templates.parts.vision_values import vision_values

GEMMA3_TEXT = get_family("gemma3_text")

_INNER = f"{TOWER}vision_model."
SPELLINGS = (
    Spelling("language_model.model.", "language_model.lm_head.", {TOWER: _INNER, PROJECTOR: PROJECTOR}),
    llava_spelling(TOWER, PROJECTOR),
    Spelling(
        "model.language_model.", "lm_head.", {TOWER: f"model.{_INNER}", PROJECTOR: f"model.{PROJECTOR}"}
    ),
    module_spelling(TOWER, PROJECTOR),
)


def head(width: int, inner: int) -> Shapes:
    """Return the head that pools a picture into one vector; published files have none."""
    return {
        "head.probe": (1, 1, width),
        "head.attention.in_proj_weight": (3 * width, width),
        "head.attention.in_proj_bias": (3 * width,),
        **linear("head.attention.out_proj", width, width),
        **norm("head.layernorm", width),
        **linear("head.mlp.fc1", inner, width),
        **linear("head.mlp.fc2", width, inner),
    }


def tensors(config: McaModelConfig) -> Shapes:
    """Every tensor of tower and projector."""
    _, vision = vision_values(config)
    width, inner = vision.size("hidden_size", 768), vision.size("intermediate_size", 3072)
    size = vision.size("patch_size", 16)
    layer = {
        **norm("layer_norm1", width),
        **norm("layer_norm2", width),
        **{
            name: shape
            for x in ("q", "k", "v", "out")
            for name, shape in linear(f"self_attn.{x}_proj", width, width).items()
        },
        **linear("mlp.fc1", inner, width),
        **linear("mlp.fc2", width, inner),
    }
    tower = {
        **linear("embeddings.patch_embedding", width, size),
        "embeddings.patch_embedding.weight": (width, vision.size("num_channels", 3), size, size),
        "embeddings.position_embedding.weight": ((vision.size("image_size", 224) // size) ** 2, width),
        **repeat_shapes("encoder.layers", vision.layers("num_hidden_layers", 12), layer),
        **norm("post_layernorm", width),
        **(head(width, inner) if vision.flag("vision_use_head", True) else {}),
    }
    return {
        **{TOWER + name: shape for name, shape in tower.items()},
        f"{PROJECTOR}mm_input_projection_weight": (width, config.hidden_size),
        f"{PROJECTOR}mm_soft_emb_norm.weight": (width,),
    }


_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
}
"""Keys that published files leave out."""


def text_family() -> Family:
    """Gemma 3 as the text part."""
    defaults = {**GEMMA3_TEXT.table.defaults, **_DEFAULTS}
    return replace(GEMMA3_TEXT, config=replace(GEMMA3_TEXT.table, defaults=defaults))


FAMILY = vision_language_family(
    "gemma3",
    "Gemma3ForConditionalGeneration",
    {"gemma3_text": text_family()},
    VisionModel(
        tensors=tensors,
        spellings=SPELLINGS,
        projector=(PROJECTOR,),
        unused=(f"{TOWER}head.",),
        image_tokens="fixed",
    ),
    NestedTextConfig(text_model_type="", tied=True, defaults={"mm_tokens_per_image": 256}),
)
