"""Granite 3: HF ``GraniteForCausalLM``, Llama's weights with scaled embeddings, residuals and logits."""

from mca_models.templates.common import dense_layers
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    NO_MLP_BIAS,
    SILU,
    ConfigTable,
    Field,
    dense_fields,
)
from mca_models.templates.family import Family

CONFIG = ConfigTable(
    fields=(
        *dense_fields(),
        Field("embedding_multiplier", "embedding_multiplier", 1.0),
        Field("softmax_scale", "attention_multiplier", 1.0),
        Field("residual_multiplier", "residual_multiplier", 1.0),
        Field("logits_scaling", "logits_scaling", 1.0),
    ),
    fixed=(SILU, NO_ATTENTION_BIAS, NO_MLP_BIAS),
)

FAMILY = Family(model_type="granite", architecture="GraniteForCausalLM", config=CONFIG, params=dense_layers)
