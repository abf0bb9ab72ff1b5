"""OLMo 3: HF ``Olmo3ForCausalLM``: OLMo 2's layers; three of four have a window and a rope without scaling."""

from mca_config.types import JsonObject, Values
from mca_models.templates import get_family
from mca_models.templates.config_table import ConfigTable, Field, HfConfig, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import dense_layers
from mca_models.templates.parts.dual_rope import FULL, SLIDING, derive_dual_rope, write_dual_rope

OLMO2 = get_family("olmo2")


def derive(hf: HfConfig) -> JsonObject:
    """Kinds of layers, and a rope for each kind."""
    pattern = [SLIDING if (i + 1) % 4 else FULL for i in range(hf["num_hidden_layers"])]
    return {
        "layer_types": tuple(hf.get("layer_types") or pattern),
        **derive_dual_rope(hf, hf.get("rope_theta", 5e5), 5e5),
    }


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {"layer_types": list(values["layer_types"] or ()), **write_dual_rope(values)}


CONFIG = ConfigTable(
    fields=(*dense_fields(eps=1e-5), Field("window_size", "sliding_window", None)),
    defaults={"sliding_window": 4096, "pad_token_id": 1},
    constants=OLMO2.table.constants,
    fixed=OLMO2.table.fixed,
    facts=(Lens(derive, write),),
)

FAMILY = Family(model_type="olmo3", architecture="Olmo3ForCausalLM", config=CONFIG, params=dense_layers)
