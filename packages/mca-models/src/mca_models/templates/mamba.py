"""Models of state space layers only: HF ``MambaForCausalLM``, ``FalconMambaForCausalLM``, ``Mamba2ForCausalLM``."""

import math
from dataclasses import replace

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import SILU, ConfigTable, Field, Fixed, HfConfig
from mca_models.templates.family import Family, by_type
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import embedding, head, renamed
from mca_models.templates.parts.mamba import fields, least_step, mamba, require_groups
from mca_models.templates.parts.selective_scan import KIND, expanded, scanned, step_rank
from mca_models.weights import Param, expand_rules

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

FAMILIES = by_type(MAMBA, FALCON_MAMBA, MAMBA2)
