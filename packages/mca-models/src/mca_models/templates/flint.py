"""Flint: HF ``FlintForCausalLM``: attention sinks, sigmoid routing; RoPE only in sliding-window layers."""

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    SILU,
    ConfigTable,
    Field,
    Fixed,
    HfConfig,
    dense_fields,
)
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import in_fp32, renamed
from mca_models.templates.parts.moe import SIGMOID_ROUTING, SPARSE_LAYERS, expert_fields, moe_params
from mca_models.templates.parts.names import MoeNames
from mca_models.templates.parts.rope import FULL, SLIDING, write_layer_types
from mca_models.templates.parts.sliding_window import rotated_windows
from mca_models.weights import Param

NAMES = MoeNames(shared="mlp.shared_expert.")


def derive(hf: HfConfig) -> JsonObject:
    """Kinds of layers."""
    last = hf["num_hidden_layers"] - 1
    kinds = [FULL if i < 2 or i % 4 == 1 or i == last else SLIDING for i in range(last + 1)]
    return rotated_windows(hf.get("layer_types") or kinds)


CONFIG = ConfigTable(
    fields=(
        *dense_fields(),
        *expert_fields(count="num_experts", default=256),
        Field("window_size", "sliding_window", 513),
        Field("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", 1024),
    ),
    defaults={
        **{"num_key_value_heads": 4, "head_dim": 128, "mlp_only_layers": [0, 1], "norm_topk_prob": True},
        "router_aux_loss_coef": 0.0005,
    },
    constants={"qk_layernorm": True, "softmax_type": "learnable", "moe_router_score_function": "sigmoid"},
    fixed=(SILU, NO_ATTENTION_BIAS, Fixed("norm_topk_prob", (True,), "Megatron normalizes sigmoid scores")),
    facts=(SIGMOID_ROUTING, SPARSE_LAYERS, Lens(derive, write_layer_types)),
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order; transformers keeps routers and sinks in fp32."""
    rules = in_fp32(moe_params(config, NAMES), "router.weight", "softmax_offset")
    return rules if config.extra.get("fused_experts") else renamed(rules, {"sinks": "softmax_offset"})


FAMILY = Family(model_type="flint", architecture="FlintForCausalLM", config=CONFIG, params=params, moe=NAMES)
