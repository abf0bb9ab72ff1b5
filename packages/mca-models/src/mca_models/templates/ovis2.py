"""Ovis 2: HF ``Ovis2ForConditionalGeneration``: AIMv2 whose patches are shares of visual words, and Qwen 2."""

from functools import partial

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    TOWER,
    NestedTextConfig,
    Shapes,
    VisionModel,
    linear,
    module_spelling,
    norm,
    repeat_shapes,
)
from mca_models.templates.parts.vision_values import vision_values

_TABLE, _HEADS = "visual_embeddings_table.", (f"{TOWER}head_linear.", f"{TOWER}head_norm.")
_norm = partial(norm, bias=False)


def tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of tower and visual words."""
    _, vision = vision_values(config)
    width, patch = vision.size("hidden_size", 1024), vision.size("patch_size", 14)
    qkv, mlp = (partial(linear, bias=vision.flag(key, False)) for key in ("qkv_bias", "mlp_bias"))
    inner, words = vision.size("intermediate_size", 2816), vision.size("vocab_size", 16384)
    layer = {**_norm("rms_norm1", width), **_norm("rms_norm2", width)}
    for x in ("q", "k", "v", "out"):
        layer |= qkv(f"attention.{x}_proj", width, width)
    for x, rows, columns in (("gate", inner, width), ("up", inner, width), ("down", width, inner)):
        layer |= mlp(f"ffn.{x}_proj", rows, columns)
    tower = {
        "embeddings.patch_embedding.weight": (width, vision.size("num_channels", 3), patch, patch),
        "embeddings.patch_embedding.bias": (width,),
        "embeddings.position_embedding.weight": ((vision.size("image_size", 224) // patch) ** 2, width),
        **_norm("embeddings.rms_norm", width),
        **repeat_shapes("encoder.layers", vision.layers("num_hidden_layers", 24), layer),
        **_norm("rms_norm", width),
    }
    seen = words - vision.size("num_visual_indicator_tokens", 5)
    return {
        **{f"{TOWER}transformer.{name}": shape for name, shape in tower.items()},
        f"{TOWER}head_linear.weight": (seen, width * vision.size("hidden_stride", 1) ** 2),
        **norm(f"{TOWER}head_norm", seen),
        f"{_TABLE}weight": (words, config.hidden_size),
    }


def tokens_per_tile(config: McaModelConfig) -> int:
    """Return the features of a tile, without those of the marks around it."""
    _, vision = vision_values(config)
    side, stride = (
        vision.size("image_size", 224) // vision.size("patch_size", 14),
        vision.size("hidden_stride", 1),
    )
    return int(-(-side // stride)) ** 2


FAMILY = vision_language_family(
    "ovis2",
    "Ovis2ForConditionalGeneration",
    {"qwen2": get_family("qwen2")},
    VisionModel(
        tensors=tensors,
        spellings=(module_spelling(TOWER, _TABLE),),
        projector=(_TABLE, *_HEADS),
        image_tokens="word_marks",
        tokens_per_image=tokens_per_tile,
    ),
    NestedTextConfig(
        tied=True,
        repeated=("hidden_size", "vocab_size"),
        defaults={"image_token_id": 151665, "visual_indicator_token_ids": [*range(151666, 151671)]},
    ),
)
