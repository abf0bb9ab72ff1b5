"""Granite 3: HF ``GraniteForCausalLM``, Llama's weights with scaled embeddings, residuals and logits."""

from mca_models.templates.config_table import SWIGLU_WITHOUT_BIASES, ConfigTable, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.parts.common import dense_layers
from mca_models.templates.parts.multipliers import FACTORS

CONFIG = ConfigTable(
    fields=(
        *dense_fields(),
        *FACTORS,
    ),
    fixed=SWIGLU_WITHOUT_BIASES,
)

FAMILY = Family(model_type="granite", architecture="GraniteForCausalLM", config=CONFIG, params=dense_layers)
