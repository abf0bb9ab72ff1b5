"""Llama 2 and 3: HF ``LlamaForCausalLM``."""

from mca_config.model_config import McaModelConfig
from mca_models.templates.common import attention, dense_mlp, embedding, head
from mca_models.templates.config_table import SILU, ConfigTable, Fixed, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.names import HF_ATTN
from mca_models.weights import Param, each

CONFIG = ConfigTable(
    fields=dense_fields(),
    fixed=(
        SILU,
        Fixed("attention_bias", (False,), "Megatron has no bias on the output projection alone"),
        Fixed("mlp_bias", (False,), "Megatron has no bias on the MLP alone"),
    ),
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    layers = range(config.num_layers)
    return [embedding(), *each([*attention(config), *dense_mlp()], layers=layers), *head(config)]


def ignored_hf(config: McaModelConfig) -> frozenset[str]:
    """Rotary frequencies, which transformers saved before version 4.32."""
    return frozenset(f"{HF_ATTN}rotary_emb.inv_freq".format(layer=i) for i in range(config.num_layers))


FAMILY = Family(
    model_type="llama", architecture="LlamaForCausalLM", config=CONFIG, params=params, ignored_hf=ignored_hf
)
