"""Phi 1, 1.5, 2: HF ``PhiForCausalLM``: parallel attention and MLP after one LayerNorm, biases everywhere."""

from mca_config.model_config import McaModelConfig
from mca_models.templates.config_table import ConfigTable, DropoutTogether, Field, dense_fields, norm_epsilon
from mca_models.templates.family import Family
from mca_models.templates.parts.common import dense_layers, renamed
from mca_models.templates.parts.legacy import PHI_NAMES
from mca_models.weights import Param

CONFIG = ConfigTable(
    fields=(
        *norm_epsilon(dense_fields(eps=1e-5), "layer_norm_eps"),
        Field("hidden_act", "hidden_act", "gelu_new"),
        Field("hidden_dropout", "resid_pdrop", 0.0),
        Field("embedding_dropout", "embd_pdrop", 0.0),
        Field("qk_layernorm", "qk_layernorm", False),
    ),
    defaults={"partial_rotary_factor": 0.5},
    constants={
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "output_bias": True,
        "gated_linear_unit": False,
        "parallel_block": "one_norm",
    },
    fixed=(DropoutTogether("embd_pdrop", "resid_pdrop"),),
    partial_rotary=True,
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    return renamed(dense_layers(config), PHI_NAMES)


FAMILY = Family(model_type="phi", architecture="PhiForCausalLM", config=CONFIG, params=params)
