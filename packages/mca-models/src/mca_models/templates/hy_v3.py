"""Hunyuan 3: HF ``HYV3ForCausalLM``: sigmoid routing with a bias, QK-norm for each head."""

from functools import partial

from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    NO_MLP_BIAS,
    SILU,
    ConfigTable,
    Field,
    HfConfig,
    dense_fields,
)
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.moe import (
    SIGMOID_ROUTER,
    derive_moe_layers,
    expert_fields,
    moe_params,
    sigmoid_experts,
    write_groups,
    write_moe_layers,
)
from mca_models.templates.parts.names import MoeNames
from mca_models.templates.parts.passthrough import with_mtp_passthrough

NAMES = MoeNames(
    router="mlp.router.gate.weight",
    router_bias="mlp.expert_bias",
    shared="mlp.shared_mlp.",
    in_memory=(
        ("mlp.router.gate.", "mlp.gate."),
        ("mlp.expert_bias", "mlp.e_score_correction_bias"),
        ("mlp.shared_mlp.", "mlp.shared_experts."),
    ),
)


def derive(hf: HfConfig) -> JsonObject:
    """Derive the layers with experts, and the number of shared experts."""
    experts = sigmoid_experts({**hf, "n_shared_experts": hf.get("num_shared_experts", 1), "n_group": 1})
    return {**experts, **derive_moe_layers({**hf, "first_k_dense_replace": 1}), "mtp_num_layers": 0}


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    shared = write_groups(values)["n_shared_experts"]
    return {"num_shared_experts": shared, **write_moe_layers(values)}


CONFIG = ConfigTable(
    fields=(
        *dense_fields(eps=1e-5),
        *expert_fields(count="num_experts", default=192),
        Field("moe_router_topk_scaling_factor", "router_scaling_factor", 2.826),
    ),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 11158840.0,
        "initializer_range": 0.006,
    },
    constants={"qk_layernorm": True, **SIGMOID_ROUTER},
    fixed=(SILU, NO_ATTENTION_BIAS, NO_MLP_BIAS),
    aliases={"num_local_experts": "num_experts"},
    facts=(Lens(derive, write),),
)

FAMILY = with_mtp_passthrough(
    Family(
        model_type="hy_v3",
        architecture="HYV3ForCausalLM",
        config=CONFIG,
        params=partial(moe_params, names=NAMES),
        moe=NAMES,
    )
)
