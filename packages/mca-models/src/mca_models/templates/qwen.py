"""Qwen 1.5 to 3, the text models, and Mellum."""

from dataclasses import replace
from functools import partial

from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    SILU,
    ConfigTable,
    Field,
    Fixed,
    HfConfig,
    Lens,
    dense_fields,
)
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts.common import dense_layers
from mca_models.templates.parts.moe import (
    SHARED_WIDTH,
    SPARSE_LAYERS,
    expert_fields,
    listed_moe_layers,
    moe_params,
)
from mca_models.templates.parts.names import MoeNames
from mca_models.templates.parts.passthrough import with_mtp_passthrough
from mca_models.templates.parts.rope import (
    FULL,
    PER_LAYER_TYPE,
    SLIDING,
    derive_dual_rope,
    layer_types,
    write_dual_rope,
)
from mca_models.templates.parts.sliding_window import SWITCHED_WINDOW, window

# Qwen 2 and 2.5: HF `Qwen2ForCausalLM`: Llama's weights with biases on q, k and v.
QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    config=ConfigTable(
        fields=dense_fields(),
        defaults={"num_key_value_heads": 32},
        constants={"add_qkv_bias": True},
        fixed=(SILU,),
        facts=(SWITCHED_WINDOW,),
    ),
    params=dense_layers,
)

# Qwen 3, dense: HF `Qwen3ForCausalLM`: with QK-norm for each head.
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    config=ConfigTable(
        fields=dense_fields(),
        defaults={"head_dim": 128, "num_key_value_heads": 32},
        constants={"qk_layernorm": True},
        fixed=(SILU, NO_ATTENTION_BIAS),
        facts=(SWITCHED_WINDOW,),
    ),
    params=dense_layers,
)


# Qwen 1.5 and 2 with experts: HF `Qwen2MoeForCausalLM`, with a gated shared expert.
_QWEN2_MOE_NAMES = MoeNames(shared="mlp.shared_expert.")


def _qwen2_moe_derive(hf: HfConfig) -> dict[str, object]:
    """Derive sliding windows: every other layer before ``max_window_layers`` unless listed."""
    last = hf.get("max_window_layers", 28)
    pattern = [FULL if i % 2 or i >= last else SLIDING for i in range(hf["num_hidden_layers"])]
    return window({**hf, "layer_types": hf.get("layer_types") or pattern})


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    config=ConfigTable(
        fields=(*dense_fields(), *expert_fields(count="num_experts", default=60), SHARED_WIDTH),
        defaults={"num_key_value_heads": 16},
        constants={"add_qkv_bias": True, "moe_shared_expert_gate": True},
        fixed=(SILU, Fixed("qkv_bias", (True,), "all published models have it")),
        facts=(SPARSE_LAYERS, Lens(_qwen2_moe_derive)),
    ),
    params=partial(moe_params, names=_QWEN2_MOE_NAMES),
    moe=_QWEN2_MOE_NAMES,
)


# Qwen 3 with experts: HF `Qwen3MoeForCausalLM`.
_QWEN3_MOE_NAMES = MoeNames()


def _qwen3_moe_derive(hf: HfConfig) -> dict[str, object]:
    """Derive the sliding window, which all layers have or none."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    return {"window_size": window}


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    config=ConfigTable(
        fields=(*dense_fields(), *expert_fields(count="num_experts", default=128)),
        defaults={"num_key_value_heads": 4},
        constants={"qk_layernorm": True},
        fixed=(SILU, NO_ATTENTION_BIAS),
        aliases={"num_experts": "num_local_experts"},
        facts=(SPARSE_LAYERS, Lens(_qwen3_moe_derive)),
    ),
    params=partial(moe_params, names=_QWEN3_MOE_NAMES),
    moe=_QWEN3_MOE_NAMES,
)


# Mellum 2: HF `MellumForCausalLM`: Qwen 3's experts, windows, separate RoPE for each layer type.
MELLUM = with_mtp_passthrough(
    replace(
        QWEN3_MOE,
        model_type="mellum",
        architecture="MellumForCausalLM",
        config=replace(
            QWEN3_MOE.table,
            fields=(*QWEN3_MOE.table.fields, Field("window_size", "sliding_window", 1024)),
            defaults={
                "num_key_value_heads": 4,
                "head_dim": 128,
                "norm_topk_prob": True,
                "num_local_experts": 64,
            },
            fixed=(*QWEN3_MOE.table.fixed, PER_LAYER_TYPE),
            aliases={"num_experts": "num_local_experts"},
            facts=(
                SPARSE_LAYERS,
                listed_moe_layers(0),
                Lens(lambda hf: derive_dual_rope(hf, 5e5, 1e4), write_dual_rope),
                layer_types(lambda layer: True),
            ),
        ),
    )
)

FAMILIES = by_type(QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE, MELLUM)
