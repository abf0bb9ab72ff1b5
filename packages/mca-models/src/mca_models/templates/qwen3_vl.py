"""Qwen 3 VL, and with experts: HF ``Qwen3VLForConditionalGeneration`` and ``Qwen3VLMoeForConditionalGeneration``.

Qwen 3 with interleaved rotary positions and deepstack. Published files have a layer's experts in one tensor as
``[experts, in, out]``, transformers 5 saves them as ``[experts, out, in]`` under the same names: only the shape
distinguishes them.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import Values
from mca_models.templates import get_family
from mca_models.templates.config_table import HfConfig, dense_fields
from mca_models.templates.family import Family, by_type
from mca_models.templates.lens import Lens
from mca_models.templates.parts.moe import TRANSPOSED, expert_fields, sparse_layers, write_sparse
from mca_models.templates.parts.names import FUSED
from mca_models.templates.parts.qwen_tower import DEEPSTACK, deepstack_layers, without_window
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import NestedTextConfig
from mca_models.templates.shapes import Shape

QWEN3 = get_family("qwen3")
QWEN3_MOE = get_family("qwen3_moe")


def text_family() -> Family:
    """Qwen 3 as the text part."""
    config = replace(
        without_window(QWEN3.table), defaults={"head_dim": 128, "rope_theta": 5e5, "num_key_value_heads": 32}
    )
    return replace(QWEN3, model_type="qwen3_vl_text", config=config)


def derive(hf: HfConfig) -> dict[str, object]:
    """Derive as Qwen 3, with weights that are always normalized; experts are stored as in published files."""
    extra = {"fused_experts": True, TRANSPOSED: True}
    return {**sparse_layers({**hf, "norm_topk_prob": True}), "extra": extra}


def detect_extra(config: McaModelConfig, names: Collection[str], shapes: Mapping[str, Shape]) -> Values:
    """Return whether experts lie in one tensor, and which way."""
    stacked = [name for name in names if FUSED in name and name.endswith("down_proj")]
    shape = next((shapes[name] for name in stacked if name in shapes), ())
    turned = not shape or shape[1] == given(config.moe).moe_ffn_hidden_size != config.hidden_size
    return {"fused_experts": bool(stacked), TRANSPOSED: turned}


def moe_text_family() -> Family:
    """Qwen 3 with experts as the text part."""
    table = replace(
        QWEN3_MOE.table,
        fields=(*dense_fields(), *expert_fields(count="num_experts", default=60)),
        defaults={"rope_theta": 5e5, "num_key_value_heads": 16, "num_experts_per_tok": 4},
        facts=(Lens(derive, write_sparse),),
    )
    family = replace(QWEN3_MOE, model_type="qwen3_vl_moe_text", config=without_window(table))
    return replace(family, detect_extra=detect_extra)


def _family(model_type: str, architecture: str, text: Family) -> Family:
    return vision_language_family(
        model_type,
        architecture,
        {text.model_type: text},
        DEEPSTACK,
        NestedTextConfig(rope=((24, 20, 20), True), deepstack=deepstack_layers),
    )


QWEN3_VL = _family("qwen3_vl", "Qwen3VLForConditionalGeneration", text_family())
QWEN3_VL_MOE = _family("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", moe_text_family())

FAMILIES = by_type(QWEN3_VL, QWEN3_VL_MOE)
