"""Families that take sound alone: towers like Whisper's."""

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.family import by_type
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
from mca_models.templates.parts.whisper_tower import audio_model, convolution, whisper_tower, whisper_values

# Qwen2-Audio: HF `Qwen2AudioForConditionalGeneration`, a Whisper encoder and a Qwen 2 text model.
_QWEN2_DEFAULTS = {
    **{"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 32, "vocab_size": 151936, "max_position_embeddings": 32768},
}
"""Keys that published files leave out."""


def _qwen2_tensors(config: McaModelConfig) -> Shapes:
    _, audio = vision_values(config, "audio_config")
    return {
        **{AUDIO_TOWER + name: shape for name, shape in whisper_tower(audio).items()},
        **linear(f"{PROJECTOR}linear", config.hidden_size, audio.size("d_model", 1280)),
    }


QWEN2_AUDIO = vision_language_family(
    "qwen2_audio",
    "Qwen2AudioForConditionalGeneration",
    {"qwen2": get_family("qwen2").with_defaults(_QWEN2_DEFAULTS)},
    audio_model(
        _qwen2_tensors, lambda config, frames: ((frames - 1) // 2 - 1) // 2 + 1, mask="feature_attention_mask"
    ),
    NestedTextConfig(text_ties="nothing", towers=("audio_config",), defaults={"audio_token_index": 151646}),
    assumed=True,
)


# Audio Flamingo 3: HF `AudioFlamingo3ForConditionalGeneration`: a Whisper encoder with averaged pairs, Qwen 2.
def _flamingo_tensors(config: McaModelConfig) -> Shapes:
    about, audio = vision_values(config, "audio_config")[0], whisper_values(config)
    width, biased = config.hidden_size, about.flag("projector_bias", True)
    return {
        **{AUDIO_TOWER + name: shape for name, shape in whisper_tower(audio).items()},
        **linear(f"{PROJECTOR}linear_1", width, audio.size("d_model", 1280), bias=biased),
        **linear(f"{PROJECTOR}linear_2", width, width, bias=biased),
    }


AUDIOFLAMINGO3 = vision_language_family(
    "audioflamingo3",
    "AudioFlamingo3ForConditionalGeneration",
    {"qwen2": get_family("qwen2")},
    audio_model(
        _flamingo_tensors, lambda config, frames: -(-frames // 2) // 2, mask="input_features_mask", windows=20
    ),
    NestedTextConfig(text_ties="nothing", towers=("audio_config",), defaults={"audio_token_id": 151669}),
    assumed=True,
)


# Voxtral: HF `VoxtralForConditionalGeneration`, a Whisper encoder and a Llama text model.
# The projector joins states until they are as wide as the encoder's MLP.
_VOXTRAL_DEFAULTS = {
    **{"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 30, "num_key_value_heads": 8},
    **{"vocab_size": 131072, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "head_dim": 128},
    **{"num_attention_heads": 32, "rope_theta": 1e8},
}
"""Keys that files may leave out."""


def _voxtral_tensors(config: McaModelConfig) -> Shapes:
    audio, width = whisper_values(config), config.hidden_size
    return {
        **{AUDIO_TOWER + name: shape for name, shape in whisper_tower(audio).items()},
        **linear(f"{PROJECTOR}linear_1", width, audio.size("encoder_ffn_dim", 5120), bias=False),
        **linear(f"{PROJECTOR}linear_2", width, width, bias=False),
    }


def tokens(config: McaModelConfig, frames: int) -> int:
    """Return the features of a window."""
    audio = whisper_values(config)
    return frames // 2 * audio.size("d_model", 1280) // audio.size("encoder_ffn_dim", 5120)


VOXTRAL = vision_language_family(
    "voxtral",
    "VoxtralForConditionalGeneration",
    {"llama": get_family("llama").with_defaults(_VOXTRAL_DEFAULTS)},
    audio_model(_voxtral_tensors, tokens, mask=None, windows=None),
    NestedTextConfig(text_ties="nothing", towers=("audio_config",)),
    assumed=True,
)


# GLM-ASR: HF `GlmAsrForConditionalGeneration`, an encoder with RoPE and a Llama text model.
# The projector gets four states of the encoder together.
_GLM_DEFAULTS = {
    **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    **{"num_key_value_heads": 4, "vocab_size": 59264, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5},
}
"""Keys that files may leave out."""


def _glm_tensors(config: McaModelConfig) -> Shapes:
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


GLMASR = vision_language_family(
    "glmasr",
    "GlmAsrForConditionalGeneration",
    {"llama": get_family("llama").with_defaults(_GLM_DEFAULTS)},
    audio_model(
        _glm_tensors,
        lambda config, frames: -(-frames // 2) // 4,
        mask="input_features_mask",
        windows=21,
        positions=False,
    ),
    NestedTextConfig(tied=True, towers=("audio_config",), defaults={"audio_token_id": 59260}),
    assumed=True,
)

FAMILIES = by_type(QWEN2_AUDIO, AUDIOFLAMINGO3, VOXTRAL, GLMASR)
