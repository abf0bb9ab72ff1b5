"""K-EXAONE: HF ``ExaoneMoeForCausalLM``: EXAONE 4's attention after norms, DeepSeek V3's experts."""

from functools import partial

from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import SILU, ConfigTable, HfConfig, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.moe import (
    NORMALISED,
    SCALED,
    SIGMOID_ROUTER,
    derive_moe_layers,
    expert_fields,
    moe_params,
    sigmoid_experts,
    write_groups,
)
from mca_models.templates.parts.names import MoeNames
from mca_models.templates.parts.passthrough import with_mtp_passthrough
from mca_models.templates.parts.sliding_window import derive_rotated_windows, write_rotated_windows

BIAS = "mlp.e_score_correction_bias"
NAMES = MoeNames(router_bias=BIAS, in_memory=((BIAS, "mlp.gate.e_score_correction_bias"),))


def derive(hf: HfConfig) -> JsonObject:
    """Windows and ropes by layer, and experts."""
    experts = sigmoid_experts({**hf, "n_shared_experts": hf.get("num_shared_experts", 1)})
    return {**derive_rotated_windows(hf), **experts, **derive_moe_layers(hf), "mtp_num_layers": 0}


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    groups = write_groups(values)
    return {**write_rotated_windows(values), **groups, "num_shared_experts": groups["n_shared_experts"]}


CONFIG = ConfigTable(
    fields=(*dense_fields(eps=1e-5), *expert_fields(count="num_experts", default=64), SCALED),
    defaults={
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "pad_token_id": 0,
    },
    constants={"qk_layernorm": True, **SIGMOID_ROUTER},
    fixed=(SILU, NORMALISED),
    facts=(Lens(derive, write),),
)

FAMILY = with_mtp_passthrough(
    Family(
        model_type="exaone_moe",
        architecture="ExaoneMoeForCausalLM",
        config=CONFIG,
        params=partial(moe_params, names=NAMES),
        moe=NAMES,
    )
)
