"""Qwen 2, 2.5 and 3 VL: a tower with a patch merger, and Qwen with sectioned rotary positions."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates import get_family
from mca_models.templates.config_table import HfConfig, Lens, dense_fields, head_dim
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts.moe import TRANSPOSED, expert_fields, sparse_layers, write_sparse
from mca_models.templates.parts.names import FUSED
from mca_models.templates.parts.qwen_tower import (
    DEEPSTACK,
    MERGERS,
    VISUAL,
    deepstack_layers,
    gated_tower,
    gated_width,
    qwen2_tower,
    without_window,
)
from mca_models.templates.parts.sliding_window import window, write_window
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    NestedTextConfig,
    Shapes,
    Spelling,
    VisionModel,
    linear,
    module_spelling,
    norm,
)
from mca_models.templates.parts.vision_values import vision_values
from mca_models.templates.shapes import Shape

QWEN2 = get_family("qwen2")
SPELLINGS = (Spelling("model.", "lm_head.", {VISUAL: VISUAL}), module_spelling(VISUAL))
INSIDE = NestedTextConfig(text_ties="too", rope=((16, 24, 24), False))


# Qwen 2 VL: HF `Qwen2VLForConditionalGeneration`: Qwen 2 with sectioned rotary positions.
_DEFAULTS = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_window_layers": 80}


def _qwen2_derive(hf: HfConfig) -> JsonObject:
    """The window, and the dimension of a head, which no file chooses."""
    return {**window(hf), "kv_channels": head_dim(hf)}


def _qwen2_text() -> Family:
    """Qwen 2 as the text part."""
    fields = tuple(field for field in QWEN2.table.fields if field.hf != "head_dim")
    config = replace(
        QWEN2.table, fields=fields, defaults=_DEFAULTS, facts=(Lens(_qwen2_derive, write_window),)
    )
    return replace(QWEN2, model_type="qwen2_vl_text", config=config)


def _qwen2_tensors(config: McaModelConfig) -> Shapes:
    _, vision = vision_values(config)
    width = vision.size("embed_dim", 1280)
    inner = int(width * vision.factor("mlp_ratio", 4))
    block = {
        **norm("norm1", width),
        **norm("norm2", width),
        **linear("attn.qkv", 3 * width, width),
        **linear("attn.proj", width, width),
        **linear("mlp.fc1", inner, width),
        **linear("mlp.fc2", width, inner),
    }
    return qwen2_tower(vision, width, block, vision.size("hidden_size", 3584), bias=True)


QWEN2_VL = vision_language_family(
    "qwen2_vl",
    "Qwen2VLForConditionalGeneration",
    {"qwen2_vl_text": _qwen2_text()},
    VisionModel(tensors=_qwen2_tensors, spellings=SPELLINGS, projector=MERGERS, video_tokens="together"),
    INSIDE,
)


# Qwen 2.5 VL: HF `Qwen2_5_VLForConditionalGeneration`: Qwen 2 VL with windows in the vision model.
TEXT = replace(QWEN2_VL.texts["qwen2_vl_text"], model_type="qwen2_5_vl_text")


def _qwen2_5_tensors(config: McaModelConfig) -> Shapes:
    _, vision = vision_values(config)
    return gated_tower(vision, {"qkv": 3 * gated_width(vision)})


QWEN2_5_VL = vision_language_family(
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    {"qwen2_5_vl_text": TEXT},
    VisionModel(
        tensors=_qwen2_5_tensors,
        spellings=SPELLINGS,
        projector=MERGERS,
        video_tokens="together",
        tokens_per_second=4,
    ),
    INSIDE,
)


# Qwen 3 VL: HF `Qwen3VLForConditionalGeneration` and `Qwen3VLMoeForConditionalGeneration`: Qwen 3 with interleaved
# rotary positions and deepstack. Published files have a layer's experts in one tensor as `[experts, in, out]`,
# transformers 5 saves them as `[experts, out, in]` under the same names: only the shape distinguishes them.
QWEN3 = get_family("qwen3")
QWEN3_MOE = get_family("qwen3_moe")


def _qwen3_text() -> Family:
    """Qwen 3 as the text part."""
    config = replace(
        without_window(QWEN3.table), defaults={"head_dim": 128, "rope_theta": 5e5, "num_key_value_heads": 32}
    )
    return replace(QWEN3, model_type="qwen3_vl_text", config=config)


def _qwen3_derive(hf: HfConfig) -> dict[str, object]:
    """Derive as Qwen 3, with weights that are always normalized; experts are stored as in published files."""
    extra = {"fused_experts": True, TRANSPOSED: True}
    return {**sparse_layers({**hf, "norm_topk_prob": True}), "extra": extra}


def _qwen3_extra(config: McaModelConfig, names: Collection[str], shapes: Mapping[str, Shape]) -> Values:
    """Return whether experts lie in one tensor, and which way."""
    stacked = [name for name in names if FUSED in name and name.endswith("down_proj")]
    shape = next((shapes[name] for name in stacked if name in shapes), ())
    turned = not shape or shape[1] == given(config.moe).moe_ffn_hidden_size != config.hidden_size
    return {"fused_experts": bool(stacked), TRANSPOSED: turned}


def _qwen3_moe_text() -> Family:
    """Qwen 3 with experts as the text part."""
    table = replace(
        QWEN3_MOE.table,
        fields=(*dense_fields(), *expert_fields(count="num_experts", default=60)),
        defaults={"rope_theta": 5e5, "num_key_value_heads": 16, "num_experts_per_tok": 4},
        facts=(Lens(_qwen3_derive, write_sparse),),
    )
    family = replace(QWEN3_MOE, model_type="qwen3_vl_moe_text", config=without_window(table))
    return replace(family, detect_extra=_qwen3_extra)


def _qwen3_family(model_type: str, architecture: str, text: Family) -> Family:
    return vision_language_family(
        model_type,
        architecture,
        {text.model_type: text},
        DEEPSTACK,
        NestedTextConfig(rope=((24, 20, 20), True), deepstack=deepstack_layers),
    )


QWEN3_VL = _qwen3_family("qwen3_vl", "Qwen3VLForConditionalGeneration", _qwen3_text())
QWEN3_VL_MOE = _qwen3_family("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", _qwen3_moe_text())

FAMILIES = by_type(QWEN2_VL, QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE)
