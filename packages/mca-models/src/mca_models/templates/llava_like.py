"""LLaVA, and families that are built like it: a vision tower, a projector, and the text model of another line."""

from functools import partial

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts.clip_tower import CLIP_SPELLINGS, clip_tower, siglip_tower, unused_states
from mca_models.templates.parts.llava import (
    LLAMA_DEFAULTS,
    MISTRAL_DEFAULTS,
    NEWLINE,
    ONEVISION_GRIDS,
    TILED_SPELLINGS,
    is_clip,
    llava_tensors,
    tiled_tensors,
    tiled_tokens,
    tokens_per_frame,
    tokens_per_tile,
    tokens_together,
)
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
from mca_models.templates.parts.vision_values import VisionValues, vision_values


# LLaVA 1.5: HF `LlavaForConditionalGeneration`: a CLIP or SigLIP tower before its last layers, and a text model.
def _llava_tokens(config: McaModelConfig) -> int:
    """Return the patches of an image, with ``default`` without the tower's first, the class token of CLIP."""
    about, vision = vision_values(config)
    first = about.choice("vision_feature_select_strategy", "default", "full") == "full"
    return tokens_per_tile(config) + is_clip(vision) - (not first)


LLAVA = vision_language_family(
    "llava",
    "LlavaForConditionalGeneration",
    {
        "llama": get_family("llama").with_defaults(LLAMA_DEFAULTS),
        "mistral": get_family("mistral").with_defaults(MISTRAL_DEFAULTS),
        "qwen2": get_family("qwen2"),
        "qwen3": get_family("qwen3"),
    },
    VisionModel(
        tensors=llava_tensors,
        spellings=CLIP_SPELLINGS,
        projector=(PROJECTOR,),
        unused=partial(unused_states, default=-2),
        image_tokens="plain",
        tokens_per_image=_llava_tokens,
    ),
    NestedTextConfig(text_ties="too"),
    assumed=True,
)


# LLaVA-NeXT (1.6): HF `LlavaNextForConditionalGeneration`: LLaVA on tiles of an image.
LLAVA_NEXT = vision_language_family(
    "llava_next",
    "LlavaNextForConditionalGeneration",
    {
        "llama": get_family("llama").with_defaults(LLAMA_DEFAULTS),
        "mistral": get_family("mistral").with_defaults(MISTRAL_DEFAULTS),
        "qwen2": get_family("qwen2"),
    },
    VisionModel(
        tensors=tiled_tensors,
        spellings=TILED_SPELLINGS,
        projector=(PROJECTOR, NEWLINE),
        unused=partial(unused_states, default=-2),
        image_tokens="joined_tiles",
        tokens_per_image=tokens_per_tile,
        tokens_of_size=tiled_tokens,
    ),
    NestedTextConfig(defaults={"image_token_index": 32000}),
    assumed=True,
)


# LLaVA-OneVision: HF `LlavaOnevisionForConditionalGeneration`: SigLIP and Qwen 2; only a lone image is tiled.
LLAVA_ONEVISION = vision_language_family(
    "llava_onevision",
    "LlavaOnevisionForConditionalGeneration",
    {"qwen2": get_family("qwen2")},
    VisionModel(
        tensors=partial(tiled_tensors, clip=False),
        spellings=TILED_SPELLINGS,
        projector=(PROJECTOR, NEWLINE),
        unused=partial(unused_states, default=-1),
        image_tokens="joined_tiles",
        tokens_per_image=partial(tokens_per_tile, clip=False),
        tokens_of_size=partial(tiled_tokens, clip=False),
        tokens_together=tokens_together,
        video_tokens="pooled",
        tokens_per_frame=tokens_per_frame,
    ),
    NestedTextConfig(
        text_ties="too",
        defaults={
            **{
                "image_token_index": 151646,
                "video_token_index": 151647,
                "vision_aspect_ratio": "anyres_max_9",
            },
            "image_grid_pinpoints": ONEVISION_GRIDS,
        },
    ),
    assumed=True,
)


# ViP-LLaVA: HF `VipLlavaForConditionalGeneration`: LLaVA on the normed states of several layers of CLIP.
_VIP_LAYERS = (-2, -5, -8, -11, 6)
"""Layers of the tower whose states the projector gets, where the file does not say."""


def _vip_tensors(config: McaModelConfig) -> Shapes:
    about, vision = vision_values(config)
    taken = vision.size("hidden_size", 768) * len(about.index_or_more("vision_feature_layer", _VIP_LAYERS))
    return {
        **{TOWER + name: shape for name, shape in clip_tower(vision).items()},
        **norm(f"{PROJECTOR}projector_layernorm", taken),
        **linear(f"{PROJECTOR}linear_1", config.hidden_size, taken),
        **linear(f"{PROJECTOR}linear_2", config.hidden_size, config.hidden_size),
    }


VIPLLAVA = vision_language_family(
    "vipllava",
    "VipLlavaForConditionalGeneration",
    {"llama": get_family("llama").with_defaults(LLAMA_DEFAULTS)},
    VisionModel(
        tensors=_vip_tensors,
        spellings=CLIP_SPELLINGS,
        projector=(PROJECTOR,),
        unused=partial(unused_states, default=_VIP_LAYERS),
        image_tokens="plain",
        tokens_per_image=tokens_per_tile,
    ),
    NestedTextConfig(defaults={"image_token_index": 32000}),
    assumed=True,
)


# GOT-OCR 2: HF `GotOcr2ForConditionalGeneration`: a SAM tower before convolutions of stride 2, and Qwen 2.
def _sam_layer(vision: VisionValues, window: int) -> Shapes:
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


def _got_tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of tower and projector."""
    _, vision = vision_values(config)
    width, out = vision.size("hidden_size", 768), vision.size("output_channels", 256)
    side, patch = _patches_per_side(vision), vision.size("patch_size", 16)
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
            for name, shape in _sam_layer(vision, side if i in everywhere else window).items()
        },
        f"{TOWER}neck.conv1.weight": (out, width, 1, 1),
        f"{TOWER}neck.conv2.weight": (out, out, 3, 3),
        **norm(f"{TOWER}neck.layer_norm1", out),
        **norm(f"{TOWER}neck.layer_norm2", out),
        f"{PROJECTOR}conv_upsampler1.weight": (2 * out, out, 3, 3),
        f"{PROJECTOR}conv_upsampler2.weight": (config.hidden_size, 2 * out, 3, 3),
        **linear(f"{PROJECTOR}multimodal_projector", config.hidden_size, config.hidden_size),
    }


def _patches_per_side(vision: VisionValues) -> int:
    """Return the patches along a side of an image."""
    return vision.size("image_size", 1024) // vision.size("patch_size", 16)


def _got_tokens(config: McaModelConfig) -> int:
    """Return the features of an image, one for four by four patches."""
    return int((_patches_per_side(vision_values(config)[1]) + 3) // 4) ** 2


GOT_OCR2 = vision_language_family(
    "got_ocr2",
    "GotOcr2ForConditionalGeneration",
    {"qwen2": get_family("qwen2")},
    VisionModel(
        tensors=_got_tensors,
        spellings=(llava_spelling(TOWER, PROJECTOR), module_spelling(TOWER, PROJECTOR)),
        projector=(PROJECTOR,),
        image_tokens="enclosed",
        tokens_per_image=_got_tokens,
    ),
    NestedTextConfig(tied=True, defaults={"image_token_index": 151859}),
)


# Idefics 3, SmolVLM 2: HF `Idefics3ForConditionalGeneration` and `SmolVLMForConditionalGeneration`: SigLIP on square
# tiles, whose patches are shuffled into fewer for a linear, and Llama.
_VISION, _CONNECTOR = "vision_model.", "connector."


def _idefics_tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of tower and connector."""
    about, vision = vision_values(config)
    tower = siglip_tower(vision, head=False, default_width=1152, default_patch=32)
    merged = vision.size("hidden_size", 1152) * about.size("scale_factor", 2) ** 2
    return {
        **{_VISION + name: shape for name, shape in tower.items()},
        **linear(f"{_CONNECTOR}modality_projection.proj", config.hidden_size, merged, bias=False),
    }


def _idefics_tokens(config: McaModelConfig) -> int:
    """Return the features of a tile."""
    about, vision = vision_values(config)
    patches = (vision.size("image_size", 224) // vision.size("patch_size", 32)) ** 2
    return int(patches / about.size("scale_factor", 2) ** 2)


def _idefics_family(model_type: str, architecture: str) -> Family:
    modules = {part: f"model.{part}" for part in (_VISION, _CONNECTOR)}
    return vision_language_family(
        model_type,
        architecture,
        {"llama": get_family("llama")},
        VisionModel(
            tensors=_idefics_tensors,
            spellings=(Spelling("model.text_model.", "lm_head.", modules),),
            projector=(_CONNECTOR,),
            image_tokens="row_column_tiles",
            tokens_per_image=_idefics_tokens,
        ),
        NestedTextConfig(defaults={"image_token_id": 128257}),
    )


IDEFICS3 = _idefics_family("idefics3", "Idefics3ForConditionalGeneration")
SMOLVLM = _idefics_family("smolvlm", "SmolVLMForConditionalGeneration")


# Ovis 2: HF `Ovis2ForConditionalGeneration`: AIMv2 whose patches are shares of visual words, and Qwen 2.
_WORDS, _WORD_HEADS = "visual_embeddings_table.", (f"{TOWER}head_linear.", f"{TOWER}head_norm.")
_norm = partial(norm, bias=False)


def _ovis_tensors(config: McaModelConfig) -> Shapes:
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
        f"{_WORDS}weight": (words, config.hidden_size),
    }


def _ovis_tokens(config: McaModelConfig) -> int:
    """Return the features of a tile, without those of the marks around it."""
    _, vision = vision_values(config)
    side, stride = (
        vision.size("image_size", 224) // vision.size("patch_size", 14),
        vision.size("hidden_stride", 1),
    )
    return int(-(-side // stride)) ** 2


OVIS2 = vision_language_family(
    "ovis2",
    "Ovis2ForConditionalGeneration",
    {"qwen2": get_family("qwen2")},
    VisionModel(
        tensors=_ovis_tensors,
        spellings=(module_spelling(TOWER, _WORDS),),
        projector=(_WORDS, *_WORD_HEADS),
        image_tokens="word_marks",
        tokens_per_image=_ovis_tokens,
    ),
    NestedTextConfig(
        tied=True,
        repeated=("hidden_size", "vocab_size"),
        defaults={"image_token_id": 151665, "visual_indicator_token_ids": [*range(151666, 151671)]},
    ),
)

FAMILIES = by_type(LLAVA, LLAVA_NEXT, LLAVA_ONEVISION, VIPLLAVA, GOT_OCR2, IDEFICS3, SMOLVLM, OVIS2)
