"""Falcon with RoPE: HF ``FalconForCausalLM``: parallel attention and MLP after one or two LayerNorms."""

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import ConfigTable, Field, Fixed, HfConfig, dense_fields, norm_epsilon
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import renamed
from mca_models.templates.parts.legacy import FALCON_OUTER, fused_params, token_head
from mca_models.weights import Param

TWO_NORMS = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}


def derive(hf: HfConfig) -> JsonObject:
    """Derive the parallel block, the norms, and the number of query groups."""
    heads, new = hf["num_attention_heads"], hf.get("new_decoder_architecture", False)
    two = (hf.get("num_ln_in_parallel_attn") or (2 if new else 1)) == 2
    block = ("two_norms" if two else "one_norm") if hf.get("parallel_attn", True) else "none"
    if new and block == "none":
        raise HfConfigError(
            "config.json: 'parallel_attn' is false; supported with new_decoder_architecture: true (transformers fails)"
        )
    if block == "two_norms" and not new:
        raise HfConfigError(
            "config.json: 'num_ln_in_parallel_attn' is 2; supported without new_decoder_architecture: 1 (transformers "
            "fails)"
        )
    behind, drops = hf.get("hidden_dropout", 0.0), hf.get("attention_dropout", 0.0)
    if block == "none" and behind != drops:
        raise HfConfigError(
            f"config.json: 'attention_dropout' is {drops} and 'hidden_dropout' {behind}; supported without "
            "parallel_attn: the same (transformers drops behind attention with the former)"
        )
    if block != "none" and behind:
        raise HfConfigError(
            f"config.json: 'hidden_dropout' is {behind}; supported with parallel_attn: 0 (transformers drops the sum "
            "of attention and MLP)"
        )
    groups = 1 if hf.get("multi_query", True) and not new else hf.get("num_kv_heads") or heads
    return {
        "parallel_block": block,
        "num_query_groups": groups,
        "kv_channels": hf["hidden_size"] // heads,
        "attention_dropout": 0.0,  # with RoPE, transformers drops no weights of attention
    }


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    groups, apart = values["num_query_groups"], values["parallel_block"] == "none"
    new = not apart and (groups > 1 or values["parallel_block"] == "two_norms")
    norms = 2 if values["parallel_block"] == "two_norms" else 1
    side = {"parallel_attn": not apart, "num_ln_in_parallel_attn": norms}
    act = {"activation": values["hidden_act"], "alibi": False}
    heads = {"num_kv_heads": groups, **({} if new else {"multi_query": groups == 1})}
    drops = {"attention_dropout": values["hidden_dropout"]}
    return {**side, **act, **drops, **heads, "new_decoder_architecture": new}


OTHERS = ("pad_token_id", "num_query_groups", "kv_channels", "ffn_hidden_size")
CONFIG = ConfigTable(
    fields=(
        *(
            field
            for field in norm_epsilon(dense_fields(tied=True, eps=1e-5), "layer_norm_epsilon")
            if field.mca not in OTHERS
        ),
        Field("ffn_hidden_size", "ffn_hidden_size", lambda hf: 4 * hf["hidden_size"]),
        Field("add_bias_linear", "bias", False),
        Field("hidden_act", "activation", "gelu"),
        Field("hidden_dropout", "hidden_dropout", 0.0),
    ),
    defaults={"max_position_embeddings": 2048},
    constants={"normalization": "LayerNorm", "gated_linear_unit": False},
    fixed=(Fixed("alibi", (False,), "only rotary positions are built here"),),
    facts=(Lens(derive, write),),
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    rules = renamed(fused_params(config), FALCON_OUTER | token_head(config))
    return renamed(rules, TWO_NORMS) if config.block.parallel_block == "two_norms" else rules


FAMILY = Family(
    model_type="falcon",
    architecture="FalconForCausalLM",
    config=CONFIG,
    params=params,
    fp8_unsupported="its linears are not nn.Linear",
)
