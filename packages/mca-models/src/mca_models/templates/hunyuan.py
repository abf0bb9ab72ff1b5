"""Hunyuan 1, dense and with experts, and Hunyuan 3."""

from functools import partial

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    NO_MLP_BIAS,
    SILU,
    ConfigTable,
    Field,
    Fixed,
    HfConfig,
    Lens,
    dense_fields,
)
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts.common import dense_layers, renamed
from mca_models.templates.parts.moe import (
    SIGMOID_ROUTER,
    derive_moe_layers,
    expert_fields,
    moe_params,
    sigmoid_experts,
    write_groups,
    write_moe_layers,
)
from mca_models.templates.parts.names import QK_NORMS, MoeNames
from mca_models.templates.parts.passthrough import with_mtp_passthrough
from mca_models.templates.parts.rope import alpha_rope
from mca_models.weights import Param


# Hunyuan, dense: HF `HunYuanDenseV1ForCausalLM`: QK-norm for each head, after RoPE.
def _dense_params(config: McaModelConfig) -> list[Param]:
    return renamed(dense_layers(config), QK_NORMS)


HUNYUAN_V1_DENSE = Family(
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    config=ConfigTable(
        fields=dense_fields(eps=1e-5),
        defaults={"pad_token_id": 0},
        constants={"qk_layernorm": True, "qk_layernorm_after_rope": True},
        fixed=(SILU, NO_ATTENTION_BIAS),
        facts=(Lens(alpha_rope),),
    ),
    params=_dense_params,
)


# Hunyuan with experts: HF `HunYuanMoEV1ForCausalLM`: Hunyuan's attention, experts in every layer.
_MOE_NAMES = MoeNames(router="mlp.gate.wg.weight", shared="mlp.shared_mlp.")


def _moe_derive(hf: HfConfig) -> JsonObject:
    """The rope, and experts; files may list the same number for each layer."""
    width = hf["intermediate_size"]
    return {
        **alpha_rope(hf),
        "num_moe_experts": single_value(hf, "num_experts"),
        "moe_router_topk": single_value(hf, "moe_topk"),
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width,
    }


def single_value(hf: HfConfig, key: str) -> int:
    """The number under ``key``, which is the same for all layers."""
    value = hf.get(key, 1)
    numbers = set(value) if isinstance(value, list) else {value}
    if len(numbers) != 1:
        raise HfConfigError(
            f"config.json: '{key}' is {value!r:.80}; supported: the same number for all layers"
        )
    number: int = numbers.pop()
    return number


def _moe_write(values: Values) -> HfConfig:
    return {"num_experts": values["num_moe_experts"], "moe_topk": values["moe_router_topk"]}


def _moe_params(config: McaModelConfig) -> list[Param]:
    return renamed(moe_params(config, _MOE_NAMES), QK_NORMS)


HUNYUAN_V1_MOE = Family(
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    config=ConfigTable(
        fields=dense_fields(eps=1e-5),
        defaults=HUNYUAN_V1_DENSE.table.defaults,
        constants=HUNYUAN_V1_DENSE.table.constants,
        fixed=(
            *HUNYUAN_V1_DENSE.table.fixed,
            Fixed("use_cla", (False,), "transformers ignores it"),
            Fixed("use_mixed_mlp_moe", (True,), "transformers ignores it"),
        ),
        aliases={"num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk"},
        facts=(Lens(_moe_derive, _moe_write),),
    ),
    params=_moe_params,
    moe=_MOE_NAMES,
)


# Hunyuan 3: HF `HYV3ForCausalLM`: sigmoid routing with a bias, QK-norm for each head.
_V3_NAMES = MoeNames(
    router="mlp.router.gate.weight",
    router_bias="mlp.expert_bias",
    shared="mlp.shared_mlp.",
    in_memory=(
        ("mlp.router.gate.", "mlp.gate."),
        ("mlp.expert_bias", "mlp.e_score_correction_bias"),
        ("mlp.shared_mlp.", "mlp.shared_experts."),
    ),
)


def _v3_derive(hf: HfConfig) -> JsonObject:
    """Derive the layers with experts, and the number of shared experts."""
    experts = sigmoid_experts({**hf, "n_shared_experts": hf.get("num_shared_experts", 1), "n_group": 1})
    return {**experts, **derive_moe_layers({**hf, "first_k_dense_replace": 1}), "mtp_num_layers": 0}


def _v3_write(values: Values) -> HfConfig:
    shared = write_groups(values)["n_shared_experts"]
    return {"num_shared_experts": shared, **write_moe_layers(values)}


HY_V3 = with_mtp_passthrough(
    Family(
        model_type="hy_v3",
        architecture="HYV3ForCausalLM",
        config=ConfigTable(
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
            facts=(Lens(_v3_derive, _v3_write),),
        ),
        params=partial(moe_params, names=_V3_NAMES),
        moe=_V3_NAMES,
    )
)

FAMILIES = by_type(HUNYUAN_V1_DENSE, HUNYUAN_V1_MOE, HY_V3)
