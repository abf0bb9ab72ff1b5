"""EXAONE 4: HF ``Exaone4ForCausalLM``: norms after each block; layers with a window rotate, others do not."""

from mca_models.templates.config_table import SILU, ConfigTable, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import dense_layers
from mca_models.templates.parts.sliding_window import derive_rotated_windows, write_rotated_windows

CONFIG = ConfigTable(
    fields=dense_fields(eps=1e-5),
    defaults={"sliding_window": 4096},
    constants={"norm_placement": "post", "qk_layernorm": True},
    fixed=(SILU,),
    facts=(Lens(derive_rotated_windows, write_rotated_windows),),
)

FAMILY = Family(model_type="exaone4", architecture="Exaone4ForCausalLM", config=CONFIG, params=dense_layers)
