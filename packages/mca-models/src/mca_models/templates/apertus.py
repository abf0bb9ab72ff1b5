"""Apertus: HF ``ApertusForCausalLM``: an activation with weights, no gate, QK-norm for each head."""

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    ConfigTable,
    Fixed,
    HfConfig,
    dense_fields,
    read_rope,
)
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import dense_layers, inner, renamed
from mca_models.templates.parts.rope import LLAMA3
from mca_models.weights import SEPARATE, Layout, Param, Shaped, expand_rules

ROPE = {**LLAMA3, "rope_theta": 12e6, "factor": 8.0}
NORMS = {"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"}


def derive(hf: HfConfig) -> JsonObject:
    """The family's own rope if none is named."""
    named = any(hf.get(key) is not None for key in ("rope_parameters", "rope_scaling"))
    return {} if named else read_rope({"rope_parameters": ROPE})


CONFIG = ConfigTable(
    fields=dense_fields(eps=1e-5),
    defaults={"pad_token_id": 3, "rope_theta": ROPE["rope_theta"]},
    constants={"hidden_act": "xielu", "gated_linear_unit": False, "qk_layernorm": True},
    fixed=(NO_ATTENTION_BIAS, Fixed("hidden_act", ("xielu",), "this family's MLP")),
    facts=(Lens(derive),),
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    parts: dict[str, Layout] = {
        "alpha_p": SEPARATE,
        "alpha_n": SEPARATE,
        "beta": Shaped(()),
        "eps": Shaped(()),
    }
    weights = [
        inner(f"mlp.activation_func.{part}", f"mlp.act_fn.{part}", hf_layout=layout)
        for part, layout in parts.items()
    ]
    return [*renamed(dense_layers(config), NORMS), *expand_rules(weights, layers=range(config.num_layers))]


FAMILY = Family(model_type="apertus", architecture="ApertusForCausalLM", config=CONFIG, params=params)
