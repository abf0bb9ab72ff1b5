"""StarCoder 2: HF ``Starcoder2ForCausalLM``: LayerNorms, biases everywhere, an MLP without a gate."""

from mca_config.model_config import McaModelConfig
from mca_models.templates.config_table import (
    ConfigTable,
    DropoutTogether,
    Field,
    Fixed,
    dense_fields,
    norm_epsilon,
)
from mca_models.templates.family import Family
from mca_models.templates.parts.activations import GELU
from mca_models.templates.parts.common import dense_layers, renamed
from mca_models.weights import Param

CONFIG = ConfigTable(
    fields=(
        *norm_epsilon(dense_fields(tied=True, eps=1e-5), "norm_epsilon"),
        Field("add_bias_linear", "use_bias", True),
        Field("window_size", "sliding_window", None),
        Field("hidden_dropout", "residual_dropout", 0.0),
        Field("embedding_dropout", "embedding_dropout", 0.0),
    ),
    defaults={"num_key_value_heads": 2, "initializer_range": 0.018042},
    constants={"normalization": "LayerNorm", "hidden_act": GELU, "gated_linear_unit": False},
    fixed=(
        Fixed("hidden_act", (GELU,), "this family's MLP"),
        DropoutTogether("embedding_dropout", "residual_dropout"),
    ),
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    return renamed(dense_layers(config), {"up_proj": "c_fc", "down_proj": "c_proj"})


FAMILY = Family(model_type="starcoder2", architecture="Starcoder2ForCausalLM", config=CONFIG, params=params)
