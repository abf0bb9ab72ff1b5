"""LFM3-VL: HF ``Lfm3VlForConditionalGeneration``: gated convolutions and attention over patches, and LFM3."""

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
)
from mca_models.templates.parts.vision_values import VisionValues, vision_values

MODULES = module_spelling(TOWER, PROJECTOR)
PUBLISHED = Spelling(
    MODULES.text,
    MODULES.head,
    {f"{TOWER}patch_embed.": f"model.{TOWER}patchifier.", **MODULES.vision},
    ((".q_norm.", ".q_layernorm."), (".k_norm.", ".k_layernorm.")),
)


def layer(vision: VisionValues, kind: str) -> Shapes:
    """Return the tensors of a layer of the tower, with a convolution or with attention."""
    width, inner = vision.size("hidden_size", 1024), vision.size("intermediate_size", 2560)
    heads, kernel = vision.size("num_attention_heads", 16), vision.size("conv_kernel_size", 3)
    keys = width // heads * vision.size("num_key_value_heads", 8)
    if kind == "conv":
        mixer = {
            "conv.in_proj.weight": (3 * width, width),
            "conv.spatial_conv.weight": (width, 1, kernel, kernel),
            "conv.out_proj.weight": (width, width),
        }
    else:
        rows = {"q_proj": width, "k_proj": keys, "v_proj": keys, "out_proj": width}
        mixer = {f"self_attn.{name}.weight": (count, width) for name, count in rows.items()}
        mixer |= {f"self_attn.{x}_norm.weight": (width // heads,) for x in "qk"}
    mlp = {"w1": (inner, width), "w3": (inner, width), "w2": (width, inner)}
    return {
        **mixer,
        **{f"feed_forward.{name}.weight": shape for name, shape in mlp.items()},
        **norm("operator_norm", width, bias=False),
        **norm("ffn_norm", width, bias=False),
    }


def tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of tower and projector."""
    about, vision = vision_values(config)
    width, merge = vision.size("hidden_size", 1024), vision.size("spatial_merge_size", 2)
    between, biased = about.size("projector_hidden_size", 4096), about.flag("projector_bias", True)
    patch = vision.size("patch_size", 16) ** 2 * vision.size("temporal_patch_size", 2)
    count = vision.layers("num_hidden_layers", 14)
    usual = ["conv" if i < 2 or i % 2 else "full_attention" for i in range(count)]
    kinds = vision.kinds("layer_types", usual, "conv", "full_attention")
    return {
        f"{TOWER}patch_embed.weight": (width, vision.size("in_channels", 3) * patch),
        **norm(f"{TOWER}embedding_norm", width, bias=False),
        **{
            f"{TOWER}layers.{i}.{name}": shape
            for i, kind in enumerate(kinds)
            for name, shape in layer(vision, kind).items()
        },
        **norm(f"{PROJECTOR}layer_norm", width),
        **linear(f"{PROJECTOR}linear_1", between, width * merge**2, bias=biased),
        **linear(f"{PROJECTOR}linear_2", config.hidden_size, between, bias=biased),
    }


FAMILY = vision_language_family(
    "lfm3_vl",
    "Lfm3VlForConditionalGeneration",
    {"lfm3": get_family("lfm3")},
    VisionModel(
        tensors=tensors, spellings=(PUBLISHED, MODULES), projector=(PROJECTOR,), video_tokens="timestamps"
    ),
    NestedTextConfig(
        text_model_type="",
        tied=True,
        defaults={
            **{"image_token_id": 125_030, "video_token_id": 125_029},
            **{"vision_start_token_id": 125_009, "vision_end_token_id": 125_010},
        },
    ),
)
