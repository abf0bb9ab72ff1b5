"""Names, biases and head sizes of families that are older than Llama."""

from collections.abc import Sequence

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.types import FamilyConfig, JsonObject, Values
from mca_models.templates.config_table import HfConfig, dense_fields, norm_epsilon
from mca_models.templates.parts.common import (
    attention,
    dense_mlp,
    embedding,
    grouped_qkv,
    head,
    positions,
    renamed,
)
from mca_models.weights import Param, expand_rules

FALCON_OUTER = {
    "model.layers.{layer}.self_attn": "transformer.h.{layer}.self_attention",
    "model.layers": "transformer.h",
    "model.embed_tokens": "transformer.word_embeddings",
    "model.final_layernorm": "transformer.ln_f",
}


def token_head(config: McaModelConfig) -> dict[str, str]:
    """Rename the token-classification head."""
    return {"score.": "classifier."} if config.head.head_kind == "token_classification" else {}


GPT2_INNER = {
    **{"self_attn.qkv_proj": "attn.c_attn", "self_attn.o_proj": "attn.c_proj", "input_layernorm": "ln_1"},
    **{"post_attention_layernorm": "ln_2", "up_proj": "c_fc", "down_proj": "c_proj"},
}


BARE = "hf_without_prefix"
"""The fact in ``extra`` that names begin with the parts of the model, as in the first published files."""


def gpt2_heads(hf: HfConfig) -> JsonObject:
    """Sizes of a head."""
    return {"num_query_groups": hf["n_head"], "kv_channels": hf["n_embd"] // hf["n_head"]}


def write_gpt2_heads(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {"activation_function": values["hidden_act"]}


def gpt2_layer_rules(config: McaModelConfig, projections: Sequence[Param]) -> list[Param]:
    """The rules of one layer under this family's names."""
    return renamed([*attention(config, projections), *dense_mlp(config)], GPT2_INNER)


def gpt2_around(config: McaModelConfig, rules: Sequence[Param]) -> list[Param]:
    """Every parameter of the model whose layers have ``rules``, in checkpoint order."""
    table = renamed([positions()], {"model.embed_positions": "transformer.wpe"})
    layers = expand_rules(rules, layers=range(config.num_layers))
    return renamed([embedding(), *table, *layers, *head(config)], GPT_OUTER | token_head(config))


GPT_OUTER = {
    **{"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f"},
    "model.layers": "transformer.h",
}


GPT_DROPOUTS = {"hidden_dropout": "resid_pdrop", "attention_dropout": "attn_pdrop"}


def gpt_masks(attention: str, config: FamilyConfig) -> frozenset[str]:
    """Masks that old files hold in each layer's ``attention``."""
    kinds = ("bias", "masked_bias")
    return frozenset(
        f"{attention.format(layer=layer)}.{kind}" for layer in range(config.num_layers) for kind in kinds
    )


PHI_NAMES = {
    **{"o_proj": "dense", "q_norm": "q_layernorm", "k_norm": "k_layernorm"},
    **{"up_proj": "fc1", "down_proj": "fc2", "model.norm": "model.final_layernorm"},
}
FUSED_NAMES = {**PHI_NAMES, "up_proj": "dense_h_to_4h", "down_proj": "dense_4h_to_h"}


FUSED_FIELDS = tuple(
    field
    for field in norm_epsilon(dense_fields(eps=1e-5), "layer_norm_eps")
    if field.mca not in ("num_query_groups", "kv_channels")
)


def equal_heads(hf: HfConfig) -> JsonObject:
    """Return the head sizes: multi-head attention with equal shares of the hidden size."""
    count = hf["num_attention_heads"]
    share = hf["hidden_size"] // count
    if hf.get("head_dim") not in (None, share):
        raise HfConfigError(
            f"config.json: 'head_dim' is {hf['head_dim']!r:.80}; the heads of this family divide the hidden size, "
            f"so that it must be {share}"
        )
    return {"num_query_groups": count, "kv_channels": share}


def fused_params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    rules = [*attention(config, grouped_qkv(config, "query_key_value")), *dense_mlp(config)]
    return renamed(
        [embedding(), *expand_rules(rules, layers=range(config.num_layers)), *head(config)], FUSED_NAMES
    )
