"""Persimmon: HF ``PersimmonForCausalLM``: LayerNorms, on the heads of q and k too, biases, squared ReLUs."""

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates import phi
from mca_models.templates.arcee import CONSTANTS, RELU2
from mca_models.templates.config_table import ConfigTable, Field, Fixed, HfConfig, dense_fields, norm_epsilon
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import attention, dense_mlp, embedding, grouped_qkv, head, renamed
from mca_models.weights import Param, expand_rules

NAMES = {**phi.NAMES, "up_proj": "dense_h_to_4h", "down_proj": "dense_4h_to_h"}

FIELDS = tuple(
    field
    for field in norm_epsilon(dense_fields(eps=1e-5), "layer_norm_eps")
    if field.mca not in ("num_query_groups", "kv_channels")
)


def heads(hf: HfConfig) -> JsonObject:
    """Return the head sizes: multi-head attention with equal shares of the hidden size."""
    count = hf["num_attention_heads"]
    share = hf["hidden_size"] // count
    if hf.get("head_dim") not in (None, share):
        raise HfConfigError(
            f"config.json: 'head_dim' is {hf['head_dim']!r:.80}; the heads of this family divide the hidden size, "
            f"so that it must be {share}"
        )
    return {"num_query_groups": count, "kv_channels": share}


CONFIG = ConfigTable(
    fields=(*FIELDS, Field("qk_layernorm", "qk_layernorm", True)),
    defaults={"partial_rotary_factor": 0.5},
    constants={**CONSTANTS, "normalization": "LayerNorm", "add_bias_linear": True},
    fixed=(RELU2, Fixed("hidden_dropout", (0.0,), "transformers drops after the MLP only")),
    facts=(Lens(heads),),
    partial_rotary=True,
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    rules = [*attention(config, grouped_qkv(config, "query_key_value")), *dense_mlp(config)]
    return renamed([embedding(), *expand_rules(rules, layers=range(config.num_layers)), *head(config)], NAMES)


FAMILY = Family(model_type="persimmon", architecture="PersimmonForCausalLM", config=CONFIG, params=params)
