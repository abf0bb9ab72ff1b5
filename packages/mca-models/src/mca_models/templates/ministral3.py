"""Ministral 3: HF ``Ministral3ForCausalLM``: Mistral, queries beyond the first context grow with their position."""

from mca_models.templates.config_table import SILU, ConfigTable, Field, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import dense_layers
from mca_models.templates.parts.query_temperature import (
    YARN,
    derive_query_temperature,
    write_query_temperature,
)

CONFIG = ConfigTable(
    fields=(*dense_fields(eps=1e-5), Field("window_size", "sliding_window", None)),
    defaults={"num_key_value_heads": 8, "head_dim": 128, "pad_token_id": 11},
    fixed=(SILU,),
    facts=(Lens(lambda hf: derive_query_temperature(hf, YARN), write_query_temperature),),
)

FAMILY = Family(
    model_type="ministral3", architecture="Ministral3ForCausalLM", config=CONFIG, params=dense_layers
)
