"""LFM3: HF ``Lfm3ForCausalLM``: LFM2's convolutions, sliding windows with their own RoPE, a gate for each head."""

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import NO_ATTENTION_BIAS, ConfigTable, Field, Fixed, HfConfig
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import dense_mlp, embedding, head
from mca_models.templates.parts.rope import FULL, PER_LAYER_TYPE, SLIDING, write_layer_types
from mca_models.templates.parts.short_convolution import (
    DEFAULTS,
    FIELDS,
    MODULES,
    NO_CONV_BIAS,
    lfm3_names,
    mixers,
)
from mca_models.weights import Param, expand_rules


def read(hf: HfConfig) -> JsonObject:
    """Derive the types of layers, their RoPE, and the norms behind blocks."""
    layers = range(hf["num_hidden_layers"])
    kinds = [FULL if i % 4 == 2 else SLIDING if i and i % 4 == 0 else "conv" for i in layers]
    ropes = hf.get("rope_parameters") or {}
    full, local = ropes.get(FULL) or {}, ropes.get(SLIDING) or {}
    Fixed("rope_type", ("proportional",), "RoPE of full layers").check(full)
    Fixed("rope_type", ("default",), "RoPE of sliding-window layers").check(local)
    share = full.get("partial_rotary_factor", 1.0 if full else 0.5)
    return {
        "layer_types": tuple(hf.get("layer_types") or kinds),
        "rotary_base": float(full.get("rope_theta", 1e6)),
        "rotary_base_local": float(local.get("rope_theta", 1e4)),
        "rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": share},
        "norm_placement": "sandwich" if hf.get("use_sandwich_norm", True) else "pre",
    }


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    full = {"rope_theta": values["rotary_base"], **(values["rope_scaling"] or {})}
    local = {"rope_theta": values["rotary_base_local"], "rope_type": "default"}
    return {
        **write_layer_types(values),
        "rope_parameters": {FULL: full, SLIDING: local},
        "use_sandwich_norm": values["norm_placement"] == "sandwich",
    }


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    mlps = expand_rules(dense_mlp(config), layers=range(config.num_layers))
    return lfm3_names(config, [embedding(), *mixers(config), *mlps, *head(config)])


FAMILY = Family(
    model_type="lfm3",
    architecture="Lfm3ForCausalLM",
    config=ConfigTable(
        fields=(
            *FIELDS,
            Field("window_size", "sliding_window", 256),
            Field("head_gate", "use_attention_gate", True),
        ),
        defaults={
            **DEFAULTS,
            **{"conv_L_cache": 7, "head_dim": 128, "num_key_value_heads": 4, "pad_token_id": 124_893},
        },
        constants={"qk_layernorm": True},
        fixed=(NO_CONV_BIAS, NO_ATTENTION_BIAS, PER_LAYER_TYPE),
        aliases={
            "tie_embedding": "tie_word_embeddings",
            "block_ff_dim": "intermediate_size",
            "rms_norm_eps": "norm_eps",
        },
        facts=(Lens(read, write),),
    ),
    params=params,
    module_names={MODULES: True},
)
