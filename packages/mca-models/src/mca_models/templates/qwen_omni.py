"""Qwen 2.5 and 3 Omni, and Qwen3-ASR."""

from dataclasses import dataclass, replace

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates import get_family
from mca_models.templates.config_table import HfConfig, Lens
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts.moe import sparse_layers, write_sparse
from mca_models.templates.parts.passthrough import with_passthrough
from mca_models.templates.parts.qwen_tower import (
    MERGERS,
    VISUAL,
    deepstack_layers,
    deepstack_tower,
    gated_tower,
    gated_width,
    without_window,
)
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    AUDIO_TOWER,
    PROJECTOR,
    AudioTower,
    NestedTextConfig,
    Shapes,
    Spelling,
    VideoRules,
    VisionModel,
    as_object,
    linear,
    module_spelling,
    norm,
)
from mca_models.templates.parts.vision_values import VisionValues, vision_values
from mca_models.templates.parts.whisper_tower import convolution, encoder_layers

QWEN2 = get_family("qwen2")
QWEN3_MOE = get_family("qwen3_moe")

_MASK = "feature_attention_mask"


def pooled_encoder(audio: VisionValues) -> Shapes:
    """Return the tensors of Qwen 2.5 Omni's encoder, which averages pairs of Whisper's features."""
    width, given = audio.size("d_model", 1280), audio.size("output_dim", 3584)
    return {
        **convolution("conv1", width, audio.size("num_mel_bins", 128)),
        **convolution("conv2", width, width),
        "audio_bos_eos_token.weight": (2, given),
        **encoder_layers(audio),
        **norm("ln_post", width),
        **linear("proj", given, width),
    }


POOLED = AudioTower(
    names=(AUDIO_TOWER,), mask=_MASK, tokens=lambda config, frames: ((frames - 1) // 2 - 1) // 2 + 1
)


def strided_encoder(audio: VisionValues) -> Shapes:
    """Return the tensors of Qwen 3 Omni's encoder: strided layers and the projector of its features."""
    width = audio.size("d_model", 1280)
    return {
        **strided_layers(audio),
        **linear("proj1", width, width),
        **linear("proj2", audio.size("output_dim", 3584), width),
    }


def strided_layers(audio: VisionValues) -> Shapes:
    """Return the tensors of an encoder with convolutions over time and frequency."""
    width, inner = audio.size("d_model", 1280), audio.size("downsample_hidden_size", 480)
    return {
        **convolution("conv2d1", inner, 1, 3, 3),
        **convolution("conv2d2", inner, inner, 3, 3),
        **convolution("conv2d3", inner, inner, 3, 3),
        **linear("conv_out", width, inner * -(-audio.size("num_mel_bins", 128) // 8), bias=False),
        **encoder_layers(audio, biased_keys=True),
        **norm("ln_post", width),
    }


def _chunk(config: McaModelConfig) -> int:
    """Return the frames that convolutions get together."""
    return 2 * vision_values(config, "audio_config")[1].size("n_window", 50)


def _strided_tokens(config: McaModelConfig, frames: int) -> int:
    """Return 13 tokens for each full chunk, a number that transformers fixes, and those of the rest."""
    full, rest = divmod(frames, _chunk(config))
    return full * 13 + -(-rest // 8)


STRIDED = AudioTower(names=(AUDIO_TOWER,), mask=_MASK, tokens=_strided_tokens, chunk=_chunk, unpadded=True)

THINKER, THINKER_CONFIG = "thinker.", "thinker_config"
_TOWERS = {VISUAL: VISUAL, AUDIO_TOWER: AUDIO_TOWER}
SPELLINGS = (Spelling("model.", "lm_head.", _TOWERS), module_spelling(VISUAL, AUDIO_TOWER))


@dataclass(frozen=True, kw_only=True)
class ThinkerConfig(NestedTextConfig):
    """``config.json`` of a complete checkpoint, with that of the thinker in ``thinker_config``."""

    def text_config(self, hf: HfConfig) -> HfConfig:
        """Return the keys that describe the text model."""
        return super().text_config(thinker_config(hf))

    def other_fields(self, hf: HfConfig) -> Values:
        """Return the fields of ``McaModelConfig`` that the text keys do not give."""
        return super().other_fields(thinker_config(hf))

    def update_text(self, hf: HfConfig, changes: Values) -> HfConfig:
        """Return ``hf`` with ``changes`` to its text keys."""
        return {**hf, THINKER_CONFIG: super().update_text(hf[THINKER_CONFIG], changes)}

    def compose(self, text: HfConfig, config: McaModelConfig) -> HfConfig:
        """Compose the file for ``config``, without a talker, from the keys ``text`` of its text model."""
        thinker = super().compose(text, config)
        outside = {key: thinker.pop(key) for key in ("architectures", "dtype", "model_type")}
        return {**outside, "enable_audio_output": False, THINKER_CONFIG: thinker}


def thinker_config(hf: HfConfig) -> JsonObject:
    """Return ``config.json`` of the thinker, in the dtype of the complete checkpoint."""
    dtype: JsonObject = {key: hf[key] for key in ("dtype", "torch_dtype") if key in hf}
    return {"model_type": hf["model_type"], **as_object(hf, THINKER_CONFIG), **dtype}


def whole_family(
    thinker: Family, inside: NestedTextConfig, kind: str, architecture: str, spoken: tuple[str, ...]
) -> Family:
    """Return the family of complete checkpoints.

    Args:
        thinker: The family of the thinker.
        inside: How the thinker's ``config.json`` holds that of the text part.
        kind: HF's name of the family.
        architecture: The HF class.
        spoken: Beginnings of the names of what is not the thinker.
    """
    assert thinker.vision is not None, "a thinker has towers"
    spellings = tuple(
        Spelling(
            THINKER + each.text, THINKER + each.head, {own: THINKER + its for own, its in each.vision.items()}
        )
        for each in thinker.vision.spellings
    )
    settings = {name: getattr(inside, name) for name in inside.__dataclass_fields__}
    vision = replace(thinker.vision, spellings=spellings)
    whole = vision_language_family(kind, architecture, thinker.texts, vision, ThinkerConfig(**settings))

    def built(config: McaModelConfig) -> McaModelConfig:
        named = {"architectures": [thinker.architecture], "model_type": thinker.model_type}
        hf = {**thinker_config(config.hf_config), **named} if config.hf_config else {}
        return replace(config, model_type=thinker.model_type, hf_config=hf)

    return with_passthrough(whole, spoken, built)


# Qwen 2.5 Omni: HF `Qwen2_5OmniThinkerForConditionalGeneration`, and `Qwen2_5OmniForConditionalGeneration`.
_QWEN2_5_DEFAULTS = {"rope_theta": 1e6, "num_key_value_heads": 4}
_QWEN2_5_TEXT = replace(QWEN2.with_defaults(_QWEN2_5_DEFAULTS), model_type="qwen2_5_omni_text")


def _qwen2_5_tensors(config: McaModelConfig) -> Shapes:
    _, vision = vision_values(config)
    _, audio = vision_values(config, "audio_config")
    return {
        **gated_tower(vision, dict.fromkeys("qkv", gated_width(vision))),
        **{AUDIO_TOWER + name: shape for name, shape in pooled_encoder(audio).items()},
    }


_QWEN2_5_INSIDE = NestedTextConfig(rope=((16, 24, 24), False), towers=("vision_config", "audio_config"))
QWEN2_5_OMNI_THINKER = vision_language_family(
    "qwen2_5_omni_thinker",
    "Qwen2_5OmniThinkerForConditionalGeneration",
    {_QWEN2_5_TEXT.model_type: _QWEN2_5_TEXT},
    VisionModel(
        tensors=_qwen2_5_tensors,
        spellings=SPELLINGS,
        projector=(*MERGERS, f"{AUDIO_TOWER}proj."),
        unused=lambda config: (f"{AUDIO_TOWER}audio_bos_eos_token.",),
        video_tokens="together",
        tokens_per_second=25,
        video_rules=VideoRules(fps=2, pixels=(128 * 28**2, 768 * 28**2), sound="chunks"),
        audio=POOLED,
    ),
    _QWEN2_5_INSIDE,
)
QWEN2_5_OMNI = whole_family(
    QWEN2_5_OMNI_THINKER,
    _QWEN2_5_INSIDE,
    "qwen2_5_omni",
    "Qwen2_5OmniForConditionalGeneration",
    ("talker.", "token2wav."),
)


# Qwen 3 Omni: HF `Qwen3OmniMoeThinkerForConditionalGeneration`, and `Qwen3OmniMoeForConditionalGeneration`.
_QWEN3_DEFAULTS = {
    "rope_theta": 1e6,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
_MERGERS = {
    "deepstack_merger_list.": "merger_list.",
    ".norm.": ".ln_q.",
    ".linear_fc1.": ".mlp.0.",
    ".linear_fc2.": ".mlp.2.",
}
"""Names inside of mergers that differ from Qwen 3 VL's."""


def derive(hf: HfConfig) -> dict[str, object]:
    """Derive as Qwen 3, with weights that are normalized if the file does not say."""
    return sparse_layers({"norm_topk_prob": True, **hf})


def merger_name(name: str) -> str:
    """Return the name of Qwen 3 VL's tensor ``name``."""
    for its, own in _MERGERS.items() if "merger" in name else ():
        name = name.replace(its, own)
    return name


def _qwen3_tensors(config: McaModelConfig) -> Shapes:
    _, audio = vision_values(config, "audio_config")
    return {
        **{merger_name(name): shape for name, shape in deepstack_tower(config).items()},
        **{AUDIO_TOWER + name: shape for name, shape in strided_encoder(audio).items()},
    }


_TABLE = replace(QWEN3_MOE.table, defaults=_QWEN3_DEFAULTS, facts=(Lens(derive, write_sparse),))
_QWEN3_TEXT = replace(QWEN3_MOE, model_type="qwen3_omni_moe_text", config=without_window(_TABLE))
_QWEN3_INSIDE = NestedTextConfig(
    rope=((24, 20, 20), True), deepstack=deepstack_layers, towers=("vision_config", "audio_config")
)
QWEN3_OMNI_MOE_THINKER = vision_language_family(
    "qwen3_omni_moe_thinker",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
    {_QWEN3_TEXT.model_type: _QWEN3_TEXT},
    VisionModel(
        tensors=_qwen3_tensors,
        spellings=SPELLINGS,
        projector=(f"{VISUAL}merger", f"{AUDIO_TOWER}proj"),
        video_tokens="together",
        tokens_per_second=25,
        video_rules=VideoRules(fps=1, pixels=(128 * 32**2, 768 * 32**2), exact=True, sound="time"),
        audio=STRIDED,
    ),
    _QWEN3_INSIDE,
)
QWEN3_OMNI_MOE = whole_family(
    QWEN3_OMNI_MOE_THINKER,
    _QWEN3_INSIDE,
    "qwen3_omni_moe",
    "Qwen3OmniMoeForConditionalGeneration",
    ("talker.", "code2wav."),
)


# Qwen3-ASR: HF `Qwen3ASRForConditionalGeneration`, the encoder of Qwen 3 Omni and a Qwen 3 text model.
_SIZES = {"d_model": 1024, "encoder_ffn_dim": 4096, "encoder_layers": 24}
"""Values of keys that ``audio_config`` leaves out, other than those of Qwen 3 Omni."""


def _asr_tensors(config: McaModelConfig) -> Shapes:
    _, given = vision_values(config, "audio_config")
    audio = VisionValues({**_SIZES, **given.values}, given.inside)
    width = audio.size("d_model", 1024)
    return {
        **{AUDIO_TOWER + name: shape for name, shape in strided_layers(audio).items()},
        **linear(f"{PROJECTOR}linear_1", width, width),
        **linear(f"{PROJECTOR}linear_2", audio.size("output_dim", 3584), width),
    }


QWEN3_ASR = vision_language_family(
    "qwen3_asr",
    "Qwen3ASRForConditionalGeneration",
    {"qwen3": get_family("qwen3")},
    VisionModel(
        tensors=_asr_tensors,
        spellings=(module_spelling(AUDIO_TOWER, PROJECTOR),),
        projector=(PROJECTOR,),
        image_tokens=None,
        audio=replace(STRIDED, mask="input_features_mask"),
    ),
    NestedTextConfig(tied=True, towers=("audio_config",), defaults={"audio_token_id": 151676}),
    assumed=True,
)

FAMILIES = by_type(QWEN2_5_OMNI_THINKER, QWEN2_5_OMNI, QWEN3_OMNI_MOE_THINKER, QWEN3_OMNI_MOE, QWEN3_ASR)
