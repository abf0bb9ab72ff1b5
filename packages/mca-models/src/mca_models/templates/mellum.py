"""Mellum 2: HF ``MellumForCausalLM``: Qwen 3's experts, windows, separate RoPE for each layer type."""

from dataclasses import replace

from mca_models.templates import get_family
from mca_models.templates.config_table import Field
from mca_models.templates.lens import Lens
from mca_models.templates.parts.moe import SPARSE_LAYERS, listed_moe_layers
from mca_models.templates.parts.passthrough import with_mtp_passthrough
from mca_models.templates.parts.rope import PER_LAYER_TYPE, derive_dual_rope, layer_types, write_dual_rope

QWEN3_MOE = get_family("qwen3_moe")


CONFIG = replace(
    QWEN3_MOE.table,
    fields=(*QWEN3_MOE.table.fields, Field("window_size", "sliding_window", 1024)),
    defaults={"num_key_value_heads": 4, "head_dim": 128, "norm_topk_prob": True, "num_local_experts": 64},
    fixed=(*QWEN3_MOE.table.fixed, PER_LAYER_TYPE),
    aliases={"num_experts": "num_local_experts"},
    facts=(
        SPARSE_LAYERS,
        listed_moe_layers(0),
        Lens(lambda hf: derive_dual_rope(hf, 5e5, 1e4), write_dual_rope),
        layer_types(lambda layer: True),
    ),
)

FAMILY = with_mtp_passthrough(
    replace(QWEN3_MOE, model_type="mellum", architecture="MellumForCausalLM", config=CONFIG)
)
