"""State space models: Mamba and Falcon Mamba, Mamba 2, and with attention Bamba, Falcon H1 and Jamba."""

import math
from dataclasses import replace
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
    is_mamba_layer,
    is_moe_layer,
    read_rope,
)
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts.common import attention, dense_mlp, embedding, head, renamed
from mca_models.templates.parts.mamba import (
    BAMBA,
    FEED_FORWARD,
    PLAIN_STEPS,
    bamba_fields,
    derive_bamba,
    fields,
    least_step,
    mamba,
    mamba_mixer,
    mixed_layers,
    require_groups,
    write_bamba,
)
from mca_models.templates.parts.moe import AUX_LOSS, mlp_layers
from mca_models.templates.parts.names import MoeNames
from mca_models.templates.parts.selective_scan import (
    CHANNELS,
    FIELDS,
    KIND,
    expanded,
    scanned,
    scanned_or_attended,
    step_rank,
)
from mca_models.weights import Param, expand_rules

# Mamba, Falcon Mamba, Mamba 2: HF `MambaForCausalLM`, `FalconMambaForCausalLM`, `Mamba2ForCausalLM`.
NAMES = {
    **{"model.embed_tokens": "backbone.embeddings", "model.norm": "backbone.norm_f"},
    **{".mamba.": ".mixer.", ".input_layernorm": ".norm"},
}


def mixer_only_layers(hf: HfConfig, kind: str) -> JsonObject:
    """Return fields of layers of one kind; heads of attention, which no layer has, divide by any number of ranks."""
    layers, hidden = hf["num_hidden_layers"], hf["hidden_size"]
    return {
        **{"layer_types": (kind,) * layers, "no_rope_freq": (1,) * layers, "rope_scaling": None},
        **{"num_attention_heads": hidden, "num_query_groups": hidden, "kv_channels": 1},
        "ffn_hidden_size": hidden,
    }


SIZES = (
    Field("num_layers", "num_hidden_layers"),
    Field("hidden_size", "hidden_size"),
    Field("vocab_size", "vocab_size"),
    Field("layernorm_epsilon", "layer_norm_epsilon", 1e-5),
    Field("init_method_std", "initializer_range", 0.1),
    Field("tie_word_embeddings", "tie_word_embeddings"),
    # no pad_token_id: to the embedding of transformers' models a padding token is like any other
)
CONFIG = ConfigTable(
    fields=(
        *SIZES,
        Field("scan_channels", "intermediate_size", lambda hf: expanded(hf, "expand")),
        Field("scan_state_dim", "state_size", 16),
        Field("scan_conv_kernel_dim", "conv_kernel", 4),
        Field("scan_conv_bias", "use_conv_bias", True),
    ),
    defaults={
        **{"num_hidden_layers": 32, "hidden_size": 768, "vocab_size": 50280},
        "tie_word_embeddings": True,
    },
    constants={
        **{"single_blocks": True, "hidden_act": "silu", "max_position_embeddings": 1 << 20},
        "scan_norm": "none",
    },
    fixed=(SILU, Fixed("use_bias", (False,), "projections of state space layers have no biases")),
    facts=(Lens(lambda hf: mixer_only_layers(hf, KIND)), step_rank("time_step_rank")),
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    rules = mamba(config) if config.mamba is not None else scanned(config)
    layers = expand_rules(rules, layers=range(config.num_layers))
    return renamed(renamed([embedding(), *layers, *head(config)], NAMES), {"model.layers": "backbone.layers"})


MAMBA = Family(
    model_type="mamba",
    architecture="MambaForCausalLM",
    config=CONFIG,
    params=params,
    unadaptable=frozenset({"dt_proj", "out_proj"}),
)
FALCON_MAMBA = replace(
    MAMBA,
    model_type="falcon_mamba",
    architecture="FalconMambaForCausalLM",
    config=replace(
        CONFIG,
        fields=(*CONFIG.fields, Field("scan_norm_epsilon", "mixer_rms_eps", 1e-6)),
        constants={**CONFIG.constants, "scan_norm": "plain"},
    ),
)


def read_mamba2(hf: HfConfig) -> JsonObject:
    """Derive layers of Mamba 2 alone, and the shortest time step."""
    require_groups(hf["num_heads"], hf["n_groups"])
    heads = hf["num_heads"] * hf.get("head_dim", 64)
    if expanded(hf, "expand") != heads:
        raise HfConfigError(
            f"config.json: 'expand' is {hf.get('expand', 2)!r}; expected num_heads x head_dim / hidden_size, "
            f"{heads / hf['hidden_size']:g}"
        )
    return {**mixer_only_layers(hf, "mamba"), "mamba_least_step": least_step(hf)}


def write_mamba2(values: Values) -> HfConfig:
    """Write the HF keys."""
    inside = values["mamba_num_heads"] * values["mamba_head_dim"]
    return {
        "expand": inside // values["hidden_size"],
        "time_step_limit": [values["mamba_least_step"], math.inf],
    }


MAMBA2 = Family(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    config=ConfigTable(
        fields=(
            *SIZES,
            *fields(
                **{"heads": "num_heads", "width": "head_dim", "groups": "n_groups", "state": "state_size"},
                **{"conv": "conv_kernel", "bias": "use_conv_bias"},
            ),
        ),
        defaults={
            **{"num_hidden_layers": 64, "hidden_size": 4096, "vocab_size": 32768},
            **{"num_heads": 128, "n_groups": 8, "tie_word_embeddings": False},
        },
        constants={key: value for key, value in CONFIG.constants.items() if key != "scan_norm"},
        fixed=CONFIG.fixed,
        facts=(Lens(read_mamba2, write_mamba2),),
    ),
    params=params,
    unadaptable=frozenset({"out_proj"}),
)


# Bamba: HF `BambaForCausalLM`: Mamba 2 in most layers, attention in listed layers, an MLP in all.
def _bamba_derive(hf: HfConfig) -> JsonObject:
    """Derive the layers with attention and the sizes of Mamba layers."""
    named = hf.get("attn_layer_indices") or ()
    kinds = tuple("full_attention" if i in named else "mamba" for i in range(hf["num_hidden_layers"]))
    rope = read_rope({**hf, "partial_rotary_factor": 0.5})  # transformers does not read it next to RoPE
    return {"layer_types": kinds, **rope, **derive_bamba(hf)}


def _bamba_write(values: Values) -> HfConfig:
    named = [layer for layer in range(values["num_layers"]) if not is_mamba_layer(values, layer)]
    return {"attn_layer_indices": named, **write_bamba(values)}


def _bamba_params(config: McaModelConfig) -> list[Param]:
    mlps = expand_rules(dense_mlp(config), layers=range(config.num_layers))
    return renamed([embedding(), *mixed_layers(config), *mlps, *head(config)], FEED_FORWARD)


BAMBA_FAMILY = Family(
    model_type="bamba",
    architecture="BambaForCausalLM",
    config=ConfigTable(
        fields=(*dense_fields(eps=1e-5), *bamba_fields()),
        defaults={**BAMBA, "num_key_value_heads": 8, "pad_token_id": 0},
        fixed=(
            SILU,
            NO_ATTENTION_BIAS,
            NO_MLP_BIAS,
            PLAIN_STEPS,
            Fixed("z_loss_coefficient", (0.0, None), "there is no z-loss on logits"),
        ),
        facts=(Lens(_bamba_derive, _bamba_write),),
        partial_rotary=True,
    ),
    params=_bamba_params,
)


# Jamba: HF `JambaForCausalLM`: Mamba 1 in most layers, attention without RoPE, experts in every other layer.
_JAMBA_NAMES = MoeNames(router="mlp.router.weight")


def _jamba_read(hf: HfConfig) -> JsonObject:
    """Derive the layers with attention and those with experts, which come in periods."""
    for kind in ("attn", "expert"):
        offset, period = hf[f"{kind}_layer_offset"], hf[f"{kind}_layer_period"]
        if not 0 <= offset < period:
            raise HfConfigError(
                f"config.json: '{kind}_layer_offset' is {offset}; expected 0 to {period - 1}, less than "
                f"'{kind}_layer_period'"
            )
    layers = range(hf["num_hidden_layers"])
    attended = [i % hf["attn_layer_period"] == hf["attn_layer_offset"] for i in layers]
    sparse = [i % hf["expert_layer_period"] == hf["expert_layer_offset"] for i in layers]
    experts = hf["num_experts"] if hf["num_experts"] > 1 and any(sparse) else None
    return {
        "layer_types": tuple("full_attention" if full else KIND for full in attended),
        **{"no_rope_freq": (1,) * len(layers), "rope_scaling": None},  # transformers has no RoPE here
        **{"num_moe_experts": experts, "moe_layer_freq": tuple(map(int, sparse)) if experts else None},
        "moe_ffn_hidden_size": hf["intermediate_size"] if experts else None,
    }


def _period(layers: list[int], count: int) -> tuple[int, int]:
    """Return after how many layers one of ``layers`` comes again, and the first; of none, one after the last."""
    first, *more = layers or [count]
    return (more[0] - first if more else count + 1), first


def _jamba_write(values: Values) -> HfConfig:
    count = values["num_layers"]
    attended = [layer for layer in range(count) if values["layer_types"][layer] != KIND]
    sparse = [layer for layer in range(count) if is_moe_layer(values, layer)]
    keys: HfConfig = {"num_experts": values["num_moe_experts"] or 1}
    for name, layers in (("attn", attended), ("expert", sparse)):
        keys[f"{name}_layer_period"], keys[f"{name}_layer_offset"] = _period(layers, count)
    return keys


def _jamba_params(config: McaModelConfig) -> list[Param]:
    rules = [embedding(), *scanned_or_attended(config), *mlp_layers(config, _JAMBA_NAMES), *head(config)]
    return renamed(rules, FEED_FORWARD)


JAMBA = Family(
    model_type="jamba",
    architecture="JambaForCausalLM",
    config=ConfigTable(
        fields=(*dense_fields(), *FIELDS, Field("moe_router_topk", "num_experts_per_tok", 2)),
        defaults={
            **{"num_key_value_heads": 8, "num_experts": 16, "expert_layer_period": 2, "pad_token_id": 0},
            **{"expert_layer_offset": 1, "attn_layer_period": 8, "attn_layer_offset": 4},
            "max_position_embeddings": 1 << 18,
        },
        constants={"moe_router_pre_softmax": True},
        fixed=(SILU, PLAIN_STEPS),
        aliases={"num_local_experts": "num_experts"},
        facts=(Lens(_jamba_read, _jamba_write), CHANNELS, step_rank("mamba_dt_rank"), AUX_LOSS),
    ),
    params=_jamba_params,
    moe=_JAMBA_NAMES,
    unadaptable=frozenset({"dt_proj"}),
)


# Falcon H1: HF `FalconH1ForCausalLM`: attention and Mamba 2 in parallel in every layer, with multipliers.
def _factors(hf: HfConfig, key: str, count: int) -> tuple[float, ...]:
    """The ``count`` numbers at ``key``."""
    found = hf.get(key) or [1.0] * count
    is_list = isinstance(found, list | tuple) and len(found) == count
    if not is_list or not all(isinstance(x, int | float) and isfinite(x) for x in found):
        raise HfConfigError(f"config.json: '{key}' is {found!r:.80}; supported: {count} numbers")
    return tuple(float(x) for x in found)


def _factor(hf: HfConfig, key: str) -> float:
    """The number at ``key``."""
    found = hf.get(key, 1.0)
    if not isinstance(found, int | float) or not isfinite(found):
        raise HfConfigError(f"config.json: '{key}' is {found!r:.80}; supported: a number")
    return float(found)


def _h1_derive(hf: HfConfig) -> JsonObject:
    """Factors, as far as there are some, and what is normalized of states.

    Queries, keys and values are linear in what goes into attention: its _factor, and that on keys, are one on scores.
    """
    of_mlp = _factors(hf, "mlp_multipliers", 2)
    before, after = _factor(hf, "ssm_in_multiplier"), _factor(hf, "ssm_out_multiplier")
    of_states = (*(before * x for x in _factors(hf, "ssm_multipliers", 5)), after)
    into, key = _factor(hf, "attention_in_multiplier"), _factor(hf, "key_multiplier")
    of_logits = _factor(hf, "lm_head_multiplier")
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
        "attention_out_multiplier": into * _factor(hf, "attention_out_multiplier"),
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

FAMILIES = by_type(MAMBA, FALCON_MAMBA, MAMBA2, BAMBA_FAMILY, JAMBA, FALCON_H1)
