"""ERNIE 4.5, dense and with experts."""

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import SILU, ConfigTable, Field, Fixed, HfConfig, dense_fields
from mca_models.templates.family import Family, by_type
from mca_models.templates.lens import Lens, is_moe_layer
from mca_models.templates.parts.common import dense_layers, in_fp32
from mca_models.templates.parts.moe import aux_loss, moe_params, write_aux_loss
from mca_models.templates.parts.names import MoeNames
from mca_models.templates.parts.passthrough import with_mtp_passthrough
from mca_models.weights import Param, Shaped

NO_BIAS = Fixed("use_bias", (False, None), "no published model has biases")


# ERNIE 4.5, dense: HF `Ernie4_5ForCausalLM`: Llama's weights; RoPE turns neighbouring channels.
ERNIE4_5 = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    config=ConfigTable(
        fields=dense_fields(tied=True, eps=1e-5),
        defaults={"num_key_value_heads": 2, "head_dim": 128, "rope_theta": 5e5, "pad_token_id": 0},
        constants={"rotary_interleaved": True},
        fixed=(SILU, NO_BIAS),
    ),
    params=dense_layers,
)


# ERNIE 4.5 with experts: HF `Ernie4_5_MoeForCausalLM`: softmax routing with a bias for the selection only.
BIAS = "moe_statics.e_score_correction_bias"
NAMES = MoeNames(
    router_bias=f"mlp.{BIAS}", bias_layout=Shaped((1, -1)), in_memory=((f"mlp.{BIAS}", f"mlp.gate.{BIAS}"),)
)


def derive(hf: HfConfig) -> JsonObject:
    """Derive the layers with experts, and the shared experts as one wide expert."""
    layers, step = hf["num_hidden_layers"], hf.get("moe_layer_interval", 1)
    last = hf.get("moe_layer_end_index", -1)
    sparse = range(hf.get("moe_layer_start_index", 1), layers if last == -1 else last + 1)
    width = hf["moe_intermediate_size"] * hf.get("moe_num_shared_experts", 2)
    return {
        "moe_layer_freq": tuple(int(i in sparse and (i + 1) % step == 0) for i in range(layers)),
        "moe_shared_expert_intermediate_size": width or None,
        **aux_loss(hf),
    }


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    shared, width = values["moe_shared_expert_intermediate_size"] or 0, values["moe_ffn_hidden_size"] or 1
    sparse = [layer for layer in range(values["num_layers"]) if is_moe_layer(values, layer)]
    ends = {"moe_layer_start_index": sparse[0], "moe_layer_end_index": sparse[-1]}
    return {"moe_num_shared_experts": shared // width, **ends, **write_aux_loss(values)}


CONFIG = ConfigTable(
    fields=(
        *dense_fields(tied=True, eps=1e-5),
        Field("num_moe_experts", "moe_num_experts", 64),
        Field("moe_ffn_hidden_size", "moe_intermediate_size"),
        Field("moe_router_topk", "moe_k", 6),
    ),
    defaults={**ERNIE4_5.table.defaults, "num_key_value_heads": 4, "moe_intermediate_size": 1536},
    constants={"rotary_interleaved": True, "moe_router_enable_expert_bias": True},
    fixed=(SILU, NO_BIAS, Fixed("moe_norm_min", (1e-12,), "a bound that no published model meets")),
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    facts=(Lens(derive, write),),
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order; transformers keeps routers in fp32."""
    return in_fp32(moe_params(config, NAMES), "router.weight")


ERNIE4_5_MOE = with_mtp_passthrough(
    Family(
        model_type="ernie4_5_moe",
        architecture="Ernie4_5_MoeForCausalLM",
        config=CONFIG,
        params=params,
        moe=NAMES,
    )
)

FAMILIES = by_type(ERNIE4_5, ERNIE4_5_MOE)
