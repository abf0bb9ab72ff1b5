"""Mixtral: HF ``MixtralForCausalLM``, every MLP a mixture of experts."""

from functools import partial

from mca_models.templates.config_table import SILU, ConfigTable, Field, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.parts.moe import AUX_LOSS, NO_JITTER, expert_fields, moe_params
from mca_models.templates.parts.names import BLOCK_SPARSE

CONFIG = ConfigTable(
    fields=(
        *dense_fields(),
        *expert_fields(count="num_local_experts", default=8, ffn="intermediate_size"),
        Field("window_size", "sliding_window", None),
    ),
    defaults={"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    fixed=(SILU, NO_JITTER),
    aliases={"num_experts": "num_local_experts"},
    facts=(AUX_LOSS,),
)


params = partial(moe_params, names=BLOCK_SPARSE)

FAMILY = Family(
    model_type="mixtral", architecture="MixtralForCausalLM", config=CONFIG, params=params, moe=BLOCK_SPARSE
)
