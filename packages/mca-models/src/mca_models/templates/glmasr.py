"""GLM-ASR: HF ``GlmAsrForConditionalGeneration``, an encoder with RoPE and a Llama text model.

The projector gets four states of the encoder together.
"""

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    AUDIO_TOWER,
    PROJECTOR,
    NestedTextConfig,
    Shapes,
    linear,
    norm,
    repeat_shapes,
)
from mca_models.templates.parts.vision_values import vision_values
from mca_models.templates.parts.whisper_tower import audio_model, convolution

_DEFAULTS = {
    **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    **{"num_key_value_heads": 4, "vocab_size": 59264, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5},
}
"""Keys that files may leave out."""


def tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of tower and projector."""
    _, audio = vision_values(config, "audio_config")
    width, inner = audio.size("hidden_size", 1280), audio.size("intermediate_size", 5120)
    heads = audio.size("num_attention_heads", 20)
    few = audio.values.get("num_key_value_heads") is not None
    grouped = width // heads * (audio.size("num_key_value_heads", heads) if few else heads)
    layer = {
        **linear("self_attn.q_proj", width, width),
        **linear("self_attn.k_proj", grouped, width, bias=False),
        **linear("self_attn.v_proj", grouped, width),
        **linear("self_attn.o_proj", width, width),
        **linear("mlp.fc1", inner, width),
        **linear("mlp.fc2", width, inner),
        **norm("input_layernorm", width),
        **norm("post_attention_layernorm", width),
    }
    tower = {
        **convolution("conv1", width, audio.size("num_mel_bins", 128)),
        **convolution("conv2", width, width),
        **repeat_shapes("layers", audio.layers("num_hidden_layers", 32), layer),
        **norm("norm", width),
    }
    return {
        **{AUDIO_TOWER + name: shape for name, shape in tower.items()},
        **linear(f"{PROJECTOR}linear_1", 2 * config.hidden_size, inner),
        **linear(f"{PROJECTOR}linear_2", config.hidden_size, 2 * config.hidden_size),
    }


FAMILY = vision_language_family(
    "glmasr",
    "GlmAsrForConditionalGeneration",
    {"llama": get_family("llama").with_defaults(_DEFAULTS)},
    audio_model(
        tensors,
        lambda config, frames: -(-frames // 2) // 4,
        mask="input_features_mask",
        windows=21,
        positions=False,
    ),
    NestedTextConfig(
        text_model_type="", tied=True, towers=("audio_config",), defaults={"audio_token_id": 59260}
    ),
    assumed=True,
)
