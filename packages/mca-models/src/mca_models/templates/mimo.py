"""MiMo 7B: HF ``MiMoForCausalLM`` (remote code): Qwen 2, with an MTP layer before the final norm."""

from dataclasses import replace
from functools import partial

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.config_table import Field, Fixed
from mca_models.templates.family import count_mtp_layers
from mca_models.templates.parts.common import attention, dense_layers, dense_mlp
from mca_models.templates.parts.mtp import mtp_params
from mca_models.weights import Param, SwappedHalves

QWEN2 = get_family("qwen2")

MTP = "model.mtp_layers."
PREFIX = f"{MTP}{{layer}}."
OWN = {
    "enorm": f"{PREFIX}token_layernorm",
    "hnorm": f"{PREFIX}hidden_layernorm",
    "eh_proj": f"{PREFIX}input_proj",
    "final_layernorm": f"{PREFIX}final_layernorm",
}

CONFIG = replace(
    QWEN2.table,
    fields=(*QWEN2.table.fields, Field("mtp_num_layers", "num_nextn_predict_layers", 0)),
    constants={**QWEN2.table.constants, "mtp_before_final_norm": True},
    fixed=(
        *QWEN2.table.fixed,
        Fixed("num_nextn_predict_layers", (0, 1), "what a second MTP layer takes is not known"),
        Fixed("use_sliding_window", (False,), "no published model has windows"),
    ),
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order; ``input_proj`` takes the states before the embedding."""
    mtp = mtp_params(config, [*attention(config), *dense_mlp(config)], OWN, PREFIX)
    swapped = [
        replace(rule, hf_layout=SwappedHalves()) if rule.mca.endswith("eh_proj.weight") else rule
        for rule in mtp
    ]
    return [*dense_layers(config), *swapped]


FAMILY = replace(
    QWEN2,
    model_type="mimo",
    architecture="MiMoForCausalLM",
    config=CONFIG,
    params=params,
    count_mtp=partial(count_mtp_layers, prefix=MTP),
    in_transformers=False,
)
