"""Qwen 3 Omni: HF ``Qwen3OmniMoeThinkerForConditionalGeneration``, and ``Qwen3OmniMoeForConditionalGeneration``."""

from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.config_table import HfConfig
from mca_models.templates.lens import Lens
from mca_models.templates.parts.deepstack import deepstack_layers, tower, without_window
from mca_models.templates.parts.moe import sparse_layers, write_sparse
from mca_models.templates.parts.omni import SPELLINGS, whole_family
from mca_models.templates.parts.omni_audio import STRIDED, strided_encoder
from mca_models.templates.parts.patch_merger import VISUAL
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    AUDIO_TOWER,
    NestedTextConfig,
    Shapes,
    VideoRules,
    VisionModel,
)
from mca_models.templates.parts.vision_values import vision_values

QWEN3_MOE = get_family("qwen3_moe")
_DEFAULTS = {
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


def tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of both towers."""
    _, audio = vision_values(config, "audio_config")
    seen = tower(config, config.vision.deepstack_layers if config.vision else 0)
    return {
        **{merger_name(name): shape for name, shape in seen.items()},
        **{AUDIO_TOWER + name: shape for name, shape in strided_encoder(audio).items()},
    }


_TABLE = replace(QWEN3_MOE.table, defaults=_DEFAULTS, facts=(Lens(derive, write_sparse),))
TEXT = replace(QWEN3_MOE, model_type="qwen3_omni_moe_text", config=without_window(_TABLE))
INSIDE = NestedTextConfig(
    text_model_type="",
    rope=((24, 20, 20), True),
    deepstack=deepstack_layers,
    towers=("vision_config", "audio_config"),
)
FAMILY = vision_language_family(
    "qwen3_omni_moe_thinker",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
    {TEXT.model_type: TEXT},
    VisionModel(
        tensors=tensors,
        spellings=SPELLINGS,
        projector=(f"{VISUAL}merger", f"{AUDIO_TOWER}proj"),
        video_tokens="together",
        tokens_per_second=25,
        video_rules=VideoRules(fps=1, pixels=(128 * 32**2, 768 * 32**2), exact=True, sound="time"),
        audio=STRIDED,
    ),
    INSIDE,
)
WHOLE = whole_family(
    FAMILY, INSIDE, "qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration", ("talker.", "code2wav.")
)
