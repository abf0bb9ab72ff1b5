"""OLMo 3: HF ``Olmo3ForCausalLM``: OLMo 2's layers; three of four have a window and unscaled RoPE."""

from mca_models.templates import get_family
from mca_models.templates.config_table import ConfigTable, Field, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import dense_layers
from mca_models.templates.parts.rope import derive_dual_rope, layer_types, write_dual_rope

OLMO2 = get_family("olmo2")


CONFIG = ConfigTable(
    fields=(*dense_fields(eps=1e-5), Field("window_size", "sliding_window", None)),
    defaults={"sliding_window": 4096, "pad_token_id": 1},
    constants=OLMO2.table.constants,
    fixed=OLMO2.table.fixed,
    facts=(
        layer_types(lambda layer: layer % 4 == 3),
        Lens(lambda hf: derive_dual_rope(hf, hf.get("rope_theta", 5e5), 5e5), write_dual_rope),
    ),
)

FAMILY = Family(model_type="olmo3", architecture="Olmo3ForCausalLM", config=CONFIG, params=dense_layers)
