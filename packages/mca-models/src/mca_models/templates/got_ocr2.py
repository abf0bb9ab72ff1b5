"""GOT-OCR 2: HF ``GotOcr2ForConditionalGeneration``: a SAM tower before convolutions of stride 2, and Qwen 2."""

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
)
from mca_models.templates.parts.vision_values import VisionValues, vision_values


def layer(vision: VisionValues, window: int) -> Shapes:
    """Return the tensors of a layer of the tower, whose patches attend within squares of ``window`` patches."""
    width, inner = vision.size("hidden_size", 768), vision.size("mlp_dim", 3072)
    distances = (2 * window - 1, width // vision.size("num_attention_heads", 12))
    return {
        **linear("attn.qkv", 3 * width, width, bias=vision.flag("qkv_bias", True)),
        **linear("attn.proj", width, width),
        **linear("mlp.lin1", inner, width),
        **linear("mlp.lin2", width, inner),
        **norm("layer_norm1", width),
        **norm("layer_norm2", width),
        **{f"attn.rel_pos_{axis}": distances for axis in "hw" if vision.flag("use_rel_pos", True)},
    }


def tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of tower and projector."""
    _, vision = vision_values(config)
    width, out = vision.size("hidden_size", 768), vision.size("output_channels", 256)
    side, patch = patches_per_side(vision), vision.size("patch_size", 16)
    everywhere = vision.indexes("global_attn_indexes", (2, 5, 8, 11))
    given = vision.values.get("window_size", 14)
    no_windows = type(given) is int and given == 0  # as in transformers: every layer attends everywhere
    window = side if no_windows else vision.size("window_size", 14)
    return {
        f"{TOWER}patch_embed.projection.weight": (width, vision.size("num_channels", 3), patch, patch),
        f"{TOWER}patch_embed.projection.bias": (width,),
        **({f"{TOWER}pos_embed": (1, side, side, width)} if vision.flag("use_abs_pos", True) else {}),
        **{
            f"{TOWER}layers.{i}.{name}": shape
            for i in range(vision.layers("num_hidden_layers", 12))
            for name, shape in layer(vision, side if i in everywhere else window).items()
        },
        f"{TOWER}neck.conv1.weight": (out, width, 1, 1),
        f"{TOWER}neck.conv2.weight": (out, out, 3, 3),
        **norm(f"{TOWER}neck.layer_norm1", out),
        **norm(f"{TOWER}neck.layer_norm2", out),
        f"{PROJECTOR}conv_upsampler1.weight": (2 * out, out, 3, 3),
        f"{PROJECTOR}conv_upsampler2.weight": (config.hidden_size, 2 * out, 3, 3),
        **linear(f"{PROJECTOR}multimodal_projector", config.hidden_size, config.hidden_size),
    }


def patches_per_side(vision: VisionValues) -> int:
    """Return the patches along a side of an image."""
    return vision.size("image_size", 1024) // vision.size("patch_size", 16)


def tokens_per_image(config: McaModelConfig) -> int:
    """Return the features of an image, one for four by four patches."""
    return int((patches_per_side(vision_values(config)[1]) + 3) // 4) ** 2


FAMILY = vision_language_family(
    "got_ocr2",
    "GotOcr2ForConditionalGeneration",
    {"qwen2": get_family("qwen2")},
    VisionModel(
        tensors=tensors,
        spellings=(llava_spelling(TOWER, PROJECTOR), module_spelling(TOWER, PROJECTOR)),
        projector=(PROJECTOR,),
        image_tokens="enclosed",
        tokens_per_image=tokens_per_image,
    ),
    NestedTextConfig(tied=True, defaults={"image_token_index": 151859}),
)
