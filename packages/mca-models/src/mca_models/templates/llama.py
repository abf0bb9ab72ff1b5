"""Llama 2 and 3: HF ``LlamaForCausalLM``."""

from mca_config.model_config import McaModelConfig
from mca_models.templates.common import dense_layers
from mca_models.templates.config_table import NO_ATTENTION_BIAS, NO_MLP_BIAS, SILU, ConfigTable, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.names import HF_ATTN

CONFIG = ConfigTable(
    fields=dense_fields(),
    fixed=(
        SILU,
        NO_ATTENTION_BIAS,
        NO_MLP_BIAS,
    ),
)


def ignored_hf(config: McaModelConfig) -> frozenset[str]:
    """Rotary frequencies, which transformers saved before version 4.32."""
    return frozenset(f"{HF_ATTN}rotary_emb.inv_freq".format(layer=i) for i in range(config.num_layers))


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    config=CONFIG,
    params=dense_layers,
    ignored_hf=ignored_hf,
)
