"""InternVL 3 in HF's own format: HF ``InternVLForConditionalGeneration``, over text models of several families."""

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

GPT_OSS = get_family("gpt_oss")
LLAMA = get_family("llama")
QWEN2 = get_family("qwen2")
QWEN3 = get_family("qwen3")
QWEN3_MOE = get_family("qwen3_moe")

TEXTS = (QWEN2, QWEN3, QWEN3_MOE, LLAMA, GPT_OSS)


def tensors(config: McaModelConfig) -> Shapes:
    """Every tensor of tower and projector."""
    about, vision = vision_values(config)
    width, inner = vision.size("hidden_size", 1024), vision.size("intermediate_size", 4096)
    patch, image = vision.sides("patch_size", 14), vision.sides("image_size", 448)
    biased = vision.flag("attention_bias", False)
    layer_norm = vision.choice("norm_type", "layer_norm", "rms_norm") == "layer_norm"
    layer: Shapes = {"lambda_1": (width,), "lambda_2": (width,)}
    for x in "qkv":
        layer |= linear(f"attention.{x}_proj", width, width, bias=biased)
    if vision.flag("use_qk_norm", False):
        layer |= norm("attention.q_norm", width, bias=False) | norm("attention.k_norm", width, bias=False)
    layer |= {
        **linear("attention.projection_layer", width, width),
        **linear("mlp.fc1", inner, width),
        **linear("mlp.fc2", width, inner),
        **norm("layernorm_before", width, bias=layer_norm),
        **norm("layernorm_after", width, bias=layer_norm),
    }
    tower: Shapes = {"embeddings.cls_token": (1, 1, width)}
    if vision.flag("use_mask_token", False):
        tower["embeddings.mask_token"] = (1, 1, width)
    if vision.flag("use_absolute_position_embeddings", True):
        count = (image[0] // patch[0]) * (image[1] // patch[1]) + 1
        tower["embeddings.position_embeddings"] = (1, count, width)
    tower |= {
        "embeddings.patch_embeddings.projection.weight": (width, vision.size("num_channels", 3), *patch),
        "embeddings.patch_embeddings.projection.bias": (width,),
        **repeat_shapes("encoder.layer", vision.layers("num_hidden_layers", 24), layer),
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


FAMILY = vision_language_family(
    "internvl",
    "InternVLForConditionalGeneration",
    {text.model_type: text for text in TEXTS},
    VisionModel(
        tensors=tensors,
        spellings=(llava_spelling(TOWER, PROJECTOR), module_spelling(TOWER, PROJECTOR)),
        projector=(PROJECTOR,),
        image_tokens="tiles",
        video_tokens="numbered",
        tokens_per_image=lambda config: vision_values(config)[0].size("image_seq_length", 256),
    ),
    NestedTextConfig(text_model_type="", tied=True),
)
