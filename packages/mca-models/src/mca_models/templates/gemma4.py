"""Gemma 4: HF ``Gemma4ForConditionalGeneration``: a tower that pools patches, an audio tower (E2B, E4B), and text."""

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts.gemma4_images import CLIP_MARKS, GEMMA4_TOKENS, image_reach
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    TOWER,
    AudioTower,
    NestedTextConfig,
    Shapes,
    VisionModel,
    linear,
    module_spelling,
    norm,
    repeat_shapes,
)
from mca_models.templates.parts.vision_values import VisionValues, audio_values, vision_values

AUDIO = ("audio_tower.", "embed_audio.")
_PROJECTOR = "embed_vision."
_PROJECTION = "embedding_projection"
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


def _clipped(name: str, rows: int, columns: int, clips: bool) -> Shapes:
    """Return a linear, and its bounds if it clips."""
    bounds: Shapes = {f"{name}.{bound}": () for bound in _BOUNDS} if clips else {}
    return {**linear(f"{name}.linear", rows, columns, bias=False), **bounds}


def _norms(width: int, *names: str) -> Shapes:
    return {name: shape for each in names for name, shape in norm(each, width, bias=False).items()}


def gemma4_vision_tower(vision: VisionValues) -> Shapes:
    """Return the tensors of ``gemma4_vision``."""
    width, inner = vision.size("hidden_size", 768), vision.size("intermediate_size", 3072)
    head, clips = vision.size("head_dim", 64), vision.flag("use_clipped_linears", False)
    heads = vision.size("num_attention_heads", 12) * head
    groups = vision.size("num_key_value_heads", 12) * head
    layer = {
        **_clipped("self_attn.q_proj", heads, width, clips),
        **_clipped("self_attn.k_proj", groups, width, clips),
        **_clipped("self_attn.v_proj", groups, width, clips),
        **_clipped("self_attn.o_proj", width, heads, clips),
        **_norms(head, "self_attn.q_norm", "self_attn.k_norm"),
        **_clipped("mlp.gate_proj", inner, width, clips),
        **_clipped("mlp.up_proj", inner, width, clips),
        **_clipped("mlp.down_proj", width, inner, clips),
        **_norms(width, "input_layernorm", "post_attention_layernorm"),
        **_norms(width, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    }
    moments: Shapes = {"std_bias": (width,), "std_scale": (width,)}
    return {
        **linear("patch_embedder.input_proj", width, 3 * vision.size("patch_size", 16) ** 2, bias=False),
        "patch_embedder.position_embedding_table": (2, vision.size("position_embedding_size", 10240), width),
        **repeat_shapes("encoder.layers", vision.layers("num_hidden_layers", 16), layer),
        **(moments if vision.flag("standardize", False) else {}),
    }


def gemma4_audio_tower(audio: VisionValues) -> Shapes:
    """Return the tensors of ``gemma4_audio``."""
    width, clips = audio.size("hidden_size", 1024), audio.flag("use_clipped_linears", True)
    first, second = audio.sides("subsampling_conv_channels", (128, 32))
    layer = {
        **{name: shape for half in (1, 2) for name, shape in _feed_forward(half, width, clips).items()},
        "self_attn.per_dim_scale": (width // audio.size("num_attention_heads", 8),),
        **linear("self_attn.relative_k_proj", width, width, bias=False),
        **_clipped("lconv1d.linear_start", 2 * width, width, clips),
        **_clipped("lconv1d.linear_end", width, width, clips),
        "lconv1d.depthwise_conv1d.weight": (width, 1, audio.size("conv_kernel_size", 5)),
        **_norms(width, "lconv1d.pre_layer_norm", "lconv1d.conv_norm"),
        **_norms(width, "norm_pre_attn", "norm_post_attn", "norm_out"),
    }
    for x in ("q_proj", "k_proj", "v_proj", "post"):
        layer |= _clipped(f"self_attn.{x}", width, width, clips)
    convolved = "subsample_conv_projection"
    return {
        f"{convolved}.layer0.conv.weight": (first, 1, 3, 3),
        **_norms(first, f"{convolved}.layer0.norm"),
        f"{convolved}.layer1.conv.weight": (second, first, 3, 3),
        **_norms(second, f"{convolved}.layer1.norm"),
        **linear(f"{convolved}.input_proj_linear", width, (first // 4) * second, bias=False),
        **repeat_shapes("layers", audio.layers("num_hidden_layers", 12), layer),
        **linear("output_proj", audio.size("output_proj_dims", 1536), width),
    }


def _feed_forward(half: int, width: int, clips: bool) -> Shapes:
    name = f"feed_forward{half}"
    return {
        **_clipped(f"{name}.ffw_layer_1", 4 * width, width, clips),
        **_clipped(f"{name}.ffw_layer_2", width, 4 * width, clips),
        **_norms(width, f"{name}.pre_layer_norm", f"{name}.post_layer_norm"),
    }


def tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of the towers and their projectors."""
    _, vision = vision_values(config)
    found = {
        **{TOWER + name: shape for name, shape in gemma4_vision_tower(vision).items()},
        **linear(_PROJECTOR + _PROJECTION, config.hidden_size, vision.size("hidden_size", 768), bias=False),
    }
    if (audio := audio_values(config)) is not None:
        tower, projector = AUDIO
        found |= {tower + name: shape for name, shape in gemma4_audio_tower(audio).items()}
        width = audio.size("output_proj_dims", 1536)
        found |= linear(projector + _PROJECTION, config.hidden_size, width, bias=False)
    return found


FAMILY = vision_language_family(
    "gemma4",
    "Gemma4ForConditionalGeneration",
    {"gemma4_text": get_family("gemma4_text")},
    VisionModel(
        tensors=tensors,
        spellings=(module_spelling(TOWER, _PROJECTOR, *AUDIO),),
        projector=(_PROJECTOR, AUDIO[1]),
        image_tokens="pooled",
        video_tokens="minutes",
        reach=image_reach,
        windowed=True,
        audio=AudioTower(
            names=AUDIO,
            mask="input_features_mask",
            tokens=lambda config, frames: -(-frames // 4),
            marks=CLIP_MARKS,
        ),
    ),
    NestedTextConfig(text_model_type="", tied=True, defaults=GEMMA4_TOKENS),
)
