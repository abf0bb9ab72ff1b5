"""Nemotron H and 3, Nano 2: HF ``NemotronHForCausalLM``: layers of Mamba 2, attention, or an MLP."""

from collections.abc import Collection, Mapping

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    NO_MLP_BIAS,
    RELU2_MLP,
    ConfigTable,
    Field,
    Fixed,
    HfConfig,
    Lens,
    dense_fields,
    norm_epsilon,
)
from mca_models.templates.family import Family
from mca_models.templates.parts.common import attention, dense_mlp, embedding, head, renamed
from mca_models.templates.parts.mamba import (
    PLAIN_STEPS,
    SILU,
    fields,
    layer_types_from_hf,
    layer_types_to_hf,
    mamba,
    require_groups,
)
from mca_models.templates.parts.moe import (
    NORMALISED,
    SCALED,
    SIGMOID_ROUTER,
    moe_layers,
    require_sigmoid_routing,
)
from mca_models.templates.parts.names import MoeNames
from mca_models.templates.parts.passthrough import with_mtp_passthrough
from mca_models.templates.shapes import Shape
from mca_models.weights import Param, expand_rules

NAMES = MoeNames()
MODULES = "module_names"
"""The fact in ``extra`` that files call everything as transformers' modules do."""
INNER = {
    **{"self_attn.": "mixer.", "mamba.": "mixer.", "mlp.": "mixer."},
    **{"input_layernorm": "norm", "post_attention_layernorm": "norm"},
}
_LETTERS = {"M": "mamba", "E": "moe", "*": "full_attention", "-": "mlp"}
_OLD_KEYS = {
    **{"n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias"},
    "time_step_min": "mamba_dt_min",
}


def kinds(hf: HfConfig) -> tuple[str, ...]:
    """Return the type of each layer: as listed, or from a pattern of letters."""
    listed, letters = hf.get("layers_block_type") or hf.get("layer_types"), hf.get("hybrid_override_pattern")
    if listed is None and letters is not None:
        listed = [_LETTERS.get(letter, letter) for letter in letters]
    found = layer_types_from_hf(listed or ("mamba", "moe", "full_attention", "mlp"))
    if unknown := sorted(set(found) - set(_LETTERS.values())):
        raise HfConfigError(
            f"config.json: 'layers_block_type' has {unknown[0]!r:.80}; supported: 'linear_attention', "
            "'full_attention', 'mlp', 'moe'"
        )
    return found


def derive(hf: HfConfig) -> JsonObject:
    """Derive the type of each layer, and the experts."""
    layers = kinds(hf)
    groups = hf.get("n_group") or 1
    found: JsonObject = {
        **{"num_layers": len(layers), "layer_types": layers, "no_rope_freq": (1,) * len(layers)},
        **{"rotary_base": 10000.0, "rope_scaling": None, "rotary_percent": 1.0},  # RoPE has no effect
        **_experts(hf, layers),
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": (hf.get("topk_group") or 1) if groups > 1 else None,
    }
    renamed_keys = {new: hf[old] for new, old in _OLD_KEYS.items() if old in hf}
    found |= {field.mca: renamed_keys[field.hf] for field in _FIELDS if field.hf in renamed_keys}
    sizes = {field.mca: field.read(hf) for field in _MAMBA} | found
    require_groups(sizes["mamba_num_heads"], sizes["mamba_num_groups"])
    return found


def _experts(hf: HfConfig, layers: Collection[str]) -> JsonObject:
    if "moe" not in layers:
        return {"num_moe_experts": None, "moe_ffn_hidden_size": None, "moe_latent_size": None}
    require_sigmoid_routing(hf)
    return {
        "moe_layer_freq": tuple(int(kind == "moe") for kind in layers),
        "moe_shared_expert_intermediate_size": hf.get("moe_shared_expert_intermediate_size", 7688),
    }


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    shared = values["moe_shared_expert_intermediate_size"]
    return {
        "layers_block_type": layer_types_to_hf(values),
        "n_group": values["moe_router_num_groups"] or 1,
        "topk_group": values["moe_router_group_topk"] or 1,
        **({"moe_shared_expert_intermediate_size": shared} if shared else {}),
    }


_MAMBA = fields(
    heads="mamba_num_heads",
    width="mamba_head_dim",
    groups="n_groups",
    state="ssm_state_size",
    conv="conv_kernel",
    bias="use_conv_bias",
)
_FIELDS = (
    *norm_epsilon(dense_fields(eps=1e-5), "layer_norm_epsilon"),
    Field("num_moe_experts", "n_routed_experts", 8),
    Field("moe_ffn_hidden_size", "moe_intermediate_size", 7688),
    Field("moe_router_topk", "num_experts_per_tok", 2),
    Field("moe_latent_size", "moe_latent_size", None),
    *_MAMBA,
    Field("mamba_least_step", "time_step_min", 0.001),
    SCALED,
)
_SIZES = {
    **{"vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096},
    **{"num_hidden_layers": 4, "num_experts_per_tok": 2, "n_routed_experts": 8},
}
CONFIG = ConfigTable(
    fields=_FIELDS,
    defaults={**_SIZES, "norm_topk_prob": True},
    constants={
        **{**RELU2_MLP, **SIGMOID_ROUTER},
        **{"hidden_act": "relu2", "single_blocks": True, "pad_token_id": None},
    },
    fixed=(
        NO_ATTENTION_BIAS,
        NO_MLP_BIAS,
        NORMALISED,
        SILU,
        PLAIN_STEPS,
        Fixed("use_bias", (False,), "projections of state space layers have no biases"),
        Fixed("mlp_hidden_act", ("relu2",), "MLPs and experts are built with squared ReLU"),
        Fixed("tie_word_embeddings", (False,), "transformers ties them in no model of this family"),
        Fixed("sliding_window", (None,), "transformers has no window in this family"),
        Fixed("residual_in_fp32", (False,), "transformers keeps no residual in fp32"),
    ),
    aliases={"num_local_experts": "n_routed_experts"},
    facts=(Lens(derive, write),),
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    rules = [embedding()]
    for layer, kind in enumerate(config.layer_types or ()):
        if kind == "moe":
            rules += moe_layers(config, NAMES, [layer])
            continue
        of_kind = {"mamba": mamba, "full_attention": attention, "mlp": dense_mlp}[kind]
        rules += expand_rules(of_kind(config), layers=[layer])
    top = "model" if config.extra.get(MODULES) else "backbone"
    outer = {
        **{"model.embed_tokens": f"{top}.embeddings", "model.norm": f"{top}.norm_f"},
        "model.layers": f"{top}.layers",
    }
    return renamed(renamed([*rules, *head(config)], INNER), outer)


def detect_extra(config: McaModelConfig, names: Collection[str], shapes: Mapping[str, Shape]) -> Values:
    """Whose names the files have."""
    return {MODULES: True} if any(name.startswith("model.layers.") for name in names) else {}


FAMILY = with_mtp_passthrough(
    Family(
        model_type="nemotron_h",
        architecture="NemotronHForCausalLM",
        config=CONFIG,
        params=params,
        moe=NAMES,
        detect_extra=detect_extra,
        unadaptable=frozenset({"out_proj"}),
        module_names={MODULES: True},
    )
)
