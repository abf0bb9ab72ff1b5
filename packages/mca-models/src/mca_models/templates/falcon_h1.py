"""Falcon H1: HF ``FalconH1ForCausalLM``: attention and Mamba 2 in parallel in every layer, with multipliers."""

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
    dense_fields,
)
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import attention, dense_mlp, embedding, head, renamed
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


def derive(hf: HfConfig) -> JsonObject:
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


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
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


CONFIG = ConfigTable(
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
    facts=(Lens(derive, write),),
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    layer_config = [*attention(config), *mamba_mixer(config, "self_attention.mamba."), *dense_mlp(config)]
    return renamed(
        [embedding(), *expand_rules(layer_config, layers=range(config.num_layers)), *head(config)],
        FEED_FORWARD,
    )


FAMILY = Family(
    model_type="falcon_h1",
    architecture="FalconH1ForCausalLM",
    config=CONFIG,
    params=params,
    unadaptable=frozenset({"out_proj"}),
)
