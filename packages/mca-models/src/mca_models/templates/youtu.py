"""Youtu-LLM: HF ``YoutuForCausalLM``: DeepSeek's MLA, no experts."""

from mca_models.templates.config_table import NO_ATTENTION_BIAS, SILU, ConfigTable, Field, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.mla import INTERLEAVED, LATENT_FIELDS, key_channels, mla_dense_params

DERIVED = ("kv_channels", "init_method_std")
CONFIG = ConfigTable(
    fields=(
        *(field for field in dense_fields(tied=True) if field.mca not in DERIVED),
        *LATENT_FIELDS,
        Field("init_method_std", "initializer_range", lambda hf: 2 / (5 * hf["hidden_size"]) ** 0.5),
    ),
    defaults={"q_lora_rank": 1536},
    constants={"qk_layernorm": True},
    fixed=(SILU, NO_ATTENTION_BIAS, INTERLEAVED),
    facts=(Lens(key_channels),),
)


FAMILY = Family(model_type="youtu", architecture="YoutuForCausalLM", config=CONFIG, params=mla_dense_params)
