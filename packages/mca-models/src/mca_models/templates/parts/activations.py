"""Activations of MLPs and what else ``config.json`` fixes about them."""

from mca_config.types import Values
from mca_models.templates.config_table import Fixed

RELU2 = Fixed("hidden_act", ("relu2",), "this family's MLP")


RELU2_MLP = {"hidden_act": "relu2", "gated_linear_unit": False}


GELU = "gelu_pytorch_tanh"


GELU_SANDWICH: Values = {
    "hidden_act": GELU,
    "layernorm_zero_centered_gamma": True,
    "norm_placement": "sandwich",
}


GELU_ONLY = Fixed("hidden_activation", (GELU,), "Gemma's gated MLP")


NO_BIDIRECTIONAL = Fixed("use_bidirectional_attention", (False, None), "Megatron's decoder is causal")


BOTH = "Megatron has biases on all linears or on none"
