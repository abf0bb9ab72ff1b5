"""InternVL and Qianfan-OCR."""

from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.family import by_type
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    FUSED_QKV,
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
from mca_models.templates.parts.vision_values import VisionValues, vision_values


def intern_vit(config: McaModelConfig, layers: str, *, fused: bool = False, biased: bool = False) -> Shapes:
    """Return every tensor of tower and projector.

    Args:
        config: Configuration of the model.
        layers: Name of the tower's list of layers.
        fused: q, k and v are one tensor.
        biased: Default of ``attention_bias``.
    """
    about, vision = vision_values(config)
    width = vision.size("hidden_size", 1024)
    patch, image = vision.sides("patch_size", 14), vision.sides("image_size", 448)
    tower: Shapes = {"embeddings.cls_token": (1, 1, width)}
    if vision.flag("use_mask_token", False):
        tower["embeddings.mask_token"] = (1, 1, width)
    if vision.flag("use_absolute_position_embeddings", True):
        count = (image[0] // patch[0]) * (image[1] // patch[1]) + 1
        tower["embeddings.position_embeddings"] = (1, count, width)
    layer = _layer(vision, width, fused=fused, biased=biased)
    tower |= {
        "embeddings.patch_embeddings.projection.weight": (width, vision.size("num_channels", 3), *patch),
        "embeddings.patch_embeddings.projection.bias": (width,),
        **repeat_shapes(layers, vision.layers("num_hidden_layers", 24), layer),
    }
    if not vision.flag("use_mean_pooling", True):
        tower |= norm("layernorm", width)
    merged = width * int(1 / about.factor("downsample_ratio", 0.5)) ** 2
    projector = {
        **norm("layer_norm", merged),
        **linear("linear_1", config.hidden_size, merged),
        **linear("linear_2", config.hidden_size, config.hidden_size),
    }
    return {TOWER + name: shape for name, shape in tower.items()} | {
        PROJECTOR + name: shape for name, shape in projector.items()
    }


def _layer(vision: VisionValues, width: int, *, fused: bool, biased: bool) -> Shapes:
    """Return the tensors of a layer of the tower."""
    inner, biased = vision.size("intermediate_size", 4096), vision.flag("attention_bias", biased)
    layer_norm = vision.choice("norm_type", "layer_norm", "rms_norm") == "layer_norm"
    layer: Shapes = {"lambda_1": (width,), "lambda_2": (width,)}
    if fused:
        layer |= linear(f"attention{FUSED_QKV}"[:-1], 3 * width, width, bias=biased)
    else:
        for x in "qkv":
            layer |= linear(f"attention.{x}_proj", width, width, bias=biased)
    if vision.flag("use_qk_norm", False):
        layer |= norm("attention.q_norm", width, bias=False) | norm("attention.k_norm", width, bias=False)
    return layer | {
        **linear("attention.projection_layer", width, width),
        **linear("mlp.fc1", inner, width),
        **linear("mlp.fc2", width, inner),
        **norm("layernorm_before", width, bias=layer_norm),
        **norm("layernorm_after", width, bias=layer_norm),
    }


def tokens_per_tile(config: McaModelConfig) -> int:
    """Return the features of a tile."""
    return vision_values(config)[0].size("image_seq_length", 256)


# InternVL 3 in HF's own format: HF `InternVLForConditionalGeneration`, over text models of several families.
TEXTS = ("qwen2", "qwen3", "qwen3_moe", "llama", "gpt_oss")
INTERNVL = vision_language_family(
    "internvl",
    "InternVLForConditionalGeneration",
    {text: get_family(text) for text in TEXTS},
    VisionModel(
        tensors=lambda config: intern_vit(config, "encoder.layer"),
        spellings=(llava_spelling(TOWER, PROJECTOR), module_spelling(TOWER, PROJECTOR)),
        projector=(PROJECTOR,),
        image_tokens="tiles",
        video_tokens="numbered",
        tokens_per_image=tokens_per_tile,
    ),
    NestedTextConfig(tied=True),
)


# Qianfan-OCR: HF `QianfanOCRForConditionalGeneration`: InternVL's vision model with fused q, k and v, and Qwen 3.
_FILES = Spelling(
    "language_model.model.",
    "language_model.lm_head.",
    {
        f"{TOWER}layers.": "vision_model.encoder.layers.",
        f"{TOWER}embeddings.cls_token": "vision_model.embeddings.class_embedding",
        f"{TOWER}embeddings.position_embeddings": "vision_model.embeddings.position_embedding",
        f"{TOWER}embeddings.patch_embeddings.projection.": "vision_model.embeddings.patch_embedding.",
        TOWER: "vision_model.",
        f"{PROJECTOR}layer_norm.": "mlp1.0.",
        f"{PROJECTOR}linear_1.": "mlp1.1.",
        f"{PROJECTOR}linear_2.": "mlp1.3.",
    },
    (
        *((".attention.wqkv.", ".attn.qkv."), (".attention.projection_layer.", ".attn.proj.")),
        *((".layernorm_before.", ".norm1."), (".layernorm_after.", ".norm2.")),
        *((".lambda_1", ".ls1"), (".lambda_2", ".ls2")),
    ),
)
_SAVED = replace(_FILES, layers="encoder.layers.")  # by transformers 5.23, which reads both
QIANFAN_OCR = vision_language_family(
    "qianfan_ocr",
    "QianfanOCRForConditionalGeneration",
    {"qwen3": get_family("qwen3")},
    VisionModel(
        tensors=lambda config: intern_vit(config, "layers", fused=True, biased=True),
        spellings=(_FILES, _SAVED, module_spelling(TOWER, PROJECTOR)),
        projector=(PROJECTOR,),
        image_tokens="word_tiles",
        tokens_per_image=tokens_per_tile,
        fused_qkv="one after the other",
    ),
    NestedTextConfig(),
)

FAMILIES = by_type(INTERNVL, QIANFAN_OCR)
