"""Qwen 2.5 Omni: HF ``Qwen2_5OmniThinkerForConditionalGeneration``, and ``Qwen2_5OmniForConditionalGeneration``."""

from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts.omni import SPELLINGS, whole_family
from mca_models.templates.parts.omni_audio import POOLED, pooled_encoder
from mca_models.templates.parts.patch_merger import MERGERS, VISUAL, merger, patches
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    AUDIO_TOWER,
    NestedTextConfig,
    Shapes,
    VideoRules,
    VisionModel,
    linear,
    norm,
    repeat_shapes,
)
from mca_models.templates.parts.vision_values import vision_values

QWEN2 = get_family("qwen2")
_DEFAULTS = {"rope_theta": 1e6, "num_key_value_heads": 4}
TEXT = replace(QWEN2.with_defaults(_DEFAULTS), model_type="qwen2_5_omni_text")


def tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of both towers."""
    _, vision = vision_values(config)
    _, audio = vision_values(config, "audio_config")
    width, inner = vision.size("hidden_size", 3584), vision.size("intermediate_size", 3420)
    block = {
        **norm("norm1", width, bias=False),
        **norm("norm2", width, bias=False),
        **{
            key: shape
            for x in ("q", "k", "v", "proj")
            for key, shape in linear(f"attn.{x}", width, width).items()
        },
        **linear("mlp.gate_proj", inner, width),
        **linear("mlp.up_proj", inner, width),
        **linear("mlp.down_proj", width, inner),
    }
    merged = width * vision.size("spatial_merge_size", 2) ** 2
    return {
        f"{VISUAL}patch_embed.proj.weight": patches(vision, width),
        **repeat_shapes(f"{VISUAL}blocks", vision.layers("depth", 32), block),
        **merger(f"{VISUAL}merger", width, merged, vision.size("out_hidden_size", 3584), bias=False),
        **{AUDIO_TOWER + name: shape for name, shape in pooled_encoder(audio).items()},
    }


INSIDE = NestedTextConfig(
    text_model_type="", rope=((16, 24, 24), False), towers=("vision_config", "audio_config")
)
FAMILY = vision_language_family(
    "qwen2_5_omni_thinker",
    "Qwen2_5OmniThinkerForConditionalGeneration",
    {TEXT.model_type: TEXT},
    VisionModel(
        tensors=tensors,
        spellings=SPELLINGS,
        projector=(*MERGERS, f"{AUDIO_TOWER}proj."),
        unused=lambda config: (f"{AUDIO_TOWER}audio_bos_eos_token.",),
        video_tokens="together",
        tokens_per_second=25,
        video_rules=VideoRules(fps=2, pixels=(128 * 28**2, 768 * 28**2), sound="chunks"),
        audio=POOLED,
    ),
    INSIDE,
)
WHOLE = whole_family(
    FAMILY, INSIDE, "qwen2_5_omni", "Qwen2_5OmniForConditionalGeneration", ("talker.", "token2wav.")
)
