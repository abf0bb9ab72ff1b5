"""Granite 3: HF ``GraniteForCausalLM``, Llama's weights with scaled embeddings, residuals and logits."""

from mca_models.templates.config_table import SWIGLU_WITHOUT_BIASES, ConfigTable, Field, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.parts.common import dense_layers

CONFIG = ConfigTable(
    fields=(
        *dense_fields(),
        Field("embedding_multiplier", "embedding_multiplier", 1.0),
        Field("softmax_scale", "attention_multiplier", 1.0),
        Field("residual_multiplier", "residual_multiplier", 1.0),
        Field("logits_scaling", "logits_scaling", 1.0),
    ),
    fixed=SWIGLU_WITHOUT_BIASES,
)

FAMILY = Family(model_type="granite", architecture="GraniteForCausalLM", config=CONFIG, params=dense_layers)
