"""Falcon and Falcon H1."""

from math import isfinite

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    NO_MLP_BIAS,
    SILU,
    ConfigTable,
    Field,
    Fixed,
    HfConfig,
    Lens,
    dense_fields,
    norm_epsilon,
)
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts.common import attention, dense_mlp, embedding, head, renamed
from mca_models.templates.parts.legacy import FALCON_OUTER, fused_params, token_head
from mca_models.templates.parts.mamba import (
    BAMBA,
    FEED_FORWARD,
    PLAIN_STEPS,
    bamba_fields,
    derive_bamba,
    mamba_mixer,
    write_bamba,
)
from mca_models.weights import Param, expand_rules

# Falcon with RoPE: HF `FalconForCausalLM`: parallel attention and MLP after one or two LayerNorms.
TWO_NORMS = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}


def _falcon_derive(hf: HfConfig) -> JsonObject:
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


def _falcon_write(values: Values) -> HfConfig:
    groups, apart = values["num_query_groups"], values["parallel_block"] == "none"
    new = not apart and (groups > 1 or values["parallel_block"] == "two_norms")
    norms = 2 if values["parallel_block"] == "two_norms" else 1
    side = {"parallel_attn": not apart, "num_ln_in_parallel_attn": norms}
    act = {"activation": values["hidden_act"], "alibi": False}
    heads = {"num_kv_heads": groups, **({} if new else {"multi_query": groups == 1})}
    drops = {"attention_dropout": values["hidden_dropout"]}
    return {**side, **act, **drops, **heads, "new_decoder_architecture": new}


OTHERS = ("pad_token_id", "num_query_groups", "kv_channels", "ffn_hidden_size")


def _falcon_params(config: McaModelConfig) -> list[Param]:
    rules = renamed(fused_params(config), FALCON_OUTER | token_head(config))
    return renamed(rules, TWO_NORMS) if config.block.parallel_block == "two_norms" else rules


FALCON = Family(
    model_type="falcon",
    architecture="FalconForCausalLM",
    config=ConfigTable(
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
        facts=(Lens(_falcon_derive, _falcon_write),),
    ),
    params=_falcon_params,
    fp8_unsupported="its linears are not nn.Linear",
)


# Falcon H1: HF `FalconH1ForCausalLM`: attention and Mamba 2 in parallel in every layer, with multipliers.
def factors(hf: HfConfig, key: str, count: int) -> tuple[float, ...]:
    """The ``count`` numbers at ``key``."""
    found = hf.get(key) or [1.0] * count
    is_list = isinstance(found, list | tuple) and len(found) == count
    if not is_list or not all(isinstance(x, int | float) and isfinite(x) for x in found):
        raise HfConfigError(f"config.json: '{key}' is {found!r:.80}; supported: {count} numbers")
    return tuple(float(x) for x in found)


def factor(hf: HfConfig, key: str) -> float:
    """The number at ``key``."""
    found = hf.get(key, 1.0)
    if not isinstance(found, int | float) or not isfinite(found):
        raise HfConfigError(f"config.json: '{key}' is {found!r:.80}; supported: a number")
    return float(found)


def _h1_derive(hf: HfConfig) -> JsonObject:
    """Factors, as far as there are some, and what is normalized of states.

    Queries, keys and values are linear in what goes into attention: its factor, and that on keys, are one on scores.
    """
    of_mlp = factors(hf, "mlp_multipliers", 2)
    before, after = factor(hf, "ssm_in_multiplier"), factor(hf, "ssm_out_multiplier")
    of_states = (*(before * x for x in factors(hf, "ssm_multipliers", 5)), after)
    into, key = factor(hf, "attention_in_multiplier"), factor(hf, "key_multiplier")
    of_logits = factor(hf, "lm_head_multiplier")
    if of_logits <= 0:
        raise HfConfigError(f"config.json: 'lm_head_multiplier' is {of_logits}; supported: a number above 0")
    normal = "before_gate" if hf.get("mamba_norm_before_gate", True) else "gated"
    width = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    scale = into**2 * key
    return {
        **derive_bamba(hf, hf["mamba_d_ssm"]),
        "mamba_norm": normal if hf.get("mamba_rms_norm", False) else "none",
        "mamba_multipliers": None if set(of_states) == {1.0} else of_states,
        "mlp_multipliers": None if set(of_mlp) == {1.0} else of_mlp,
        "attention_out_multiplier": into * factor(hf, "attention_out_multiplier"),
        "softmax_scale": None if scale == 1.0 else scale * width**-0.5,
        "logits_scaling": 1 / of_logits,
    }


def _h1_write(values: Values) -> HfConfig:
    *of_states, after = values["mamba_multipliers"] or (1.0,) * 6
    scale = (
        1.0 if values["softmax_scale"] is None else values["softmax_scale"] / values["kv_channels"] ** -0.5
    )
    return {
        **write_bamba(values),
        "mamba_d_ssm": (values["mamba_num_heads"] or 0) * (values["mamba_head_dim"] or 0),
        **{"attention_in_multiplier": 1.0, "ssm_in_multiplier": 1.0},  # parts of the others
        "mamba_rms_norm": values["mamba_norm"] != "none",
        "mamba_norm_before_gate": values["mamba_norm"] != "gated",
        **{"ssm_multipliers": of_states, "ssm_out_multiplier": after},
        "mlp_multipliers": list(values["mlp_multipliers"] or (1.0, 1.0)),
        "attention_out_multiplier": values["attention_out_multiplier"],
        "key_multiplier": scale,
        "lm_head_multiplier": 1 / values["logits_scaling"],
    }


def _h1_params(config: McaModelConfig) -> list[Param]:
    layer_config = [*attention(config), *mamba_mixer(config, "self_attention.mamba."), *dense_mlp(config)]
    return renamed(
        [embedding(), *expand_rules(layer_config, layers=range(config.num_layers)), *head(config)],
        FEED_FORWARD,
    )


FALCON_H1 = Family(
    model_type="falcon_h1",
    architecture="FalconH1ForCausalLM",
    config=ConfigTable(
        fields=(
            *dense_fields(eps=1e-5),
            *bamba_fields(),
            Field("embedding_multiplier", "embedding_multiplier", 1.0),
        ),
        defaults={**BAMBA, "mamba_d_ssm": 1024, "num_key_value_heads": 8, "pad_token_id": 0},
        constants={"mamba_parallel_attention": True},
        fixed=(
            SILU,
            NO_ATTENTION_BIAS,
            NO_MLP_BIAS,
            PLAIN_STEPS,
            Fixed("projectors_bias", (False,), "output projections of state space layers have no biases"),
        ),
        facts=(Lens(_h1_derive, _h1_write),),
    ),
    params=_h1_params,
    unadaptable=frozenset({"out_proj"}),
)

FAMILIES = by_type(FALCON, FALCON_H1)
