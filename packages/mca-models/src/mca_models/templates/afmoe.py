"""Arcee Trinity: HF ``AfmoeForCausalLM``: gated attention, pre- and post-norms, sigmoid routing with a bias."""

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    SILU,
    ConfigTable,
    Field,
    HfConfig,
    dense_fields,
)
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens, is_moe_layer
from mca_models.templates.parts.common import attention, gated_qkv, renamed
from mca_models.templates.parts.moe import (
    SIGMOID_ROUTER,
    expert_fields,
    fuse_shared_experts,
    moe_params,
    require_sigmoid_routing,
    write_shared_experts,
)
from mca_models.templates.parts.names import MoeNames
from mca_models.templates.parts.rope import FULL, SLIDING, write_layer_types
from mca_models.templates.parts.sliding_window import rotated_windows
from mca_models.weights import Param

NAMES = MoeNames(router="mlp.router.gate.weight", router_bias="mlp.expert_bias")
NORMS = {"pre_feedforward_layernorm": "pre_mlp_layernorm", "post_feedforward_layernorm": "post_mlp_layernorm"}


def derive(hf: HfConfig) -> JsonObject:
    """Kinds of layers, which have experts, the shared ones as one wide one, and the factor on embeddings."""
    require_sigmoid_routing(hf)
    count, step = hf["num_hidden_layers"], hf.get("global_attn_every_n_layers", 4)
    kinds = hf.get("layer_types") or [FULL if (i + 1) % step == 0 else SLIDING for i in range(count)]
    return {
        **rotated_windows(kinds),
        "moe_layer_freq": tuple(int(i >= hf.get("num_dense_layers", 1)) for i in range(count)),
        **fuse_shared_experts(hf, "num_shared_experts", 2),
        "embedding_multiplier": hf["hidden_size"] ** 0.5 if hf.get("mup_enabled") else 1.0,
    }


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    dense = [layer for layer in range(values["num_layers"]) if not is_moe_layer(values, layer)]
    counts = {"num_dense_layers": len(dense), **write_shared_experts(values, "num_shared_experts")}
    return {**counts, "mup_enabled": values["embedding_multiplier"] != 1.0, **write_layer_types(values)}


CONFIG = ConfigTable(
    fields=(
        *dense_fields(eps=1e-5),
        *expert_fields(count="num_experts", default=64),
        Field("moe_router_topk_scaling_factor", "route_scale", 1.0),
        Field("window_size", "sliding_window", 1024),
    ),
    defaults={"head_dim": 128, "num_experts_per_tok": 6},
    constants={
        "qk_layernorm": True,
        "attention_output_gate": True,
        "norm_placement": "sandwich",
        **SIGMOID_ROUTER,
    },
    fixed=(SILU, NO_ATTENTION_BIAS),
    facts=(Lens(derive, write),),
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    return renamed(moe_params(config, NAMES, attention(config, gated_qkv(config))), NORMS)


FAMILY = Family(model_type="afmoe", architecture="AfmoeForCausalLM", config=CONFIG, params=params, moe=NAMES)
