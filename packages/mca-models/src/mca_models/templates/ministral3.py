"""Ministral 3: HF ``Ministral3ForCausalLM``: Mistral, queries beyond the first context grow with their position."""

from mca_models.templates.config_table import SILU, ConfigTable, Field, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import dense_layers
from mca_models.templates.parts.query_temperature import derive_query_temperature, write_query_temperature

ROPE = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0},
    "llama_4_scaling_beta": 0.1,
}
"""Default of transformers where ``config.json`` has no rope."""

CONFIG = ConfigTable(
    fields=(*dense_fields(eps=1e-5), Field("window_size", "sliding_window", None)),
    defaults={"num_key_value_heads": 8, "head_dim": 128, "pad_token_id": 11},
    fixed=(SILU,),
    facts=(Lens(lambda hf: derive_query_temperature(hf, ROPE), write_query_temperature),),
)

FAMILY = Family(
    model_type="ministral3", architecture="Ministral3ForCausalLM", config=CONFIG, params=dense_layers
)
