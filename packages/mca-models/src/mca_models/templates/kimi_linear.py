"""Kimi Linear: HF ``KimiLinearForCausalLM``: Kimi delta attention, MLA without RoPE, experts."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    SILU,
    ConfigTable,
    Field,
    Fixed,
    HfConfig,
    dense_fields,
)
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import embedding, head, renamed
from mca_models.templates.parts.kimi_delta_attention import (
    delta_and_latent_attention,
    delta_sizes,
    write_delta_sizes,
)
from mca_models.templates.parts.mla import LATENT_FIELDS
from mca_models.templates.parts.moe import (
    SCALED,
    SIGMOID_ROUTER,
    derive_moe_layers,
    mlp_layers,
    sigmoid_experts,
    write_moe_layers,
    write_shared_experts,
)
from mca_models.templates.parts.names import BLOCK_SPARSE
from mca_models.templates.shapes import Shape
from mca_models.weights import Param

BLOCK = "block_sparse_moe."
NAMES = replace(
    BLOCK_SPARSE, router_bias=f"{BLOCK}gate.e_score_correction_bias", shared=f"{BLOCK}shared_experts."
)
OTHER = {
    "num_experts_per_tok": "num_experts_per_token",
    "n_group": "num_expert_group",
    "n_shared_experts": "num_shared_experts",
    "n_routed_experts": "num_experts",
}
"""DeepSeek's keys, and what files of this family call them."""
ALIASES = {
    **{key: OTHER[key] for key in ("num_experts_per_tok", "n_group", "n_shared_experts")},
    **{"num_local_experts": "num_experts", "max_position_embeddings": "model_max_length"},
    "norm_topk_prob": "moe_renormalize",
}


def derive(hf: HfConfig) -> JsonObject:
    """Kinds of layers, the sizes of linear attention, and experts."""
    said, count = hf.get("linear_attn_config") or {}, hf["num_hidden_layers"]
    full = said.get("full_attn_layers") or [i + 1 for i in range(count) if i and i % 4 == 0]
    kinds = ["full_attention" if i + 1 in full else "linear_attention" for i in range(count)]
    heads = said.get("num_heads", hf.get("linear_num_heads", 32))
    width = said.get("head_dim", hf.get("linear_head_dim", 128))
    kernel = said.get("short_conv_kernel_size", hf.get("linear_conv_kernel_dim", 4))
    known = {own: hf.get(theirs, hf.get(own)) for own, theirs in OTHER.items()}
    experts = sigmoid_experts({**hf, **{key: value for key, value in known.items() if value is not None}})
    return {
        **{**experts, **derive_moe_layers({"first_k_dense_replace": 1, **hf}), "mtp_num_layers": 0},
        "kv_channels": hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"],
        "layer_types": tuple(hf.get("layer_types") or kinds),
        **{"no_rope_freq": (1,) * count, "rope_scaling": None},  # the files' rope has no effect
        **delta_sizes(heads, width, kernel),
    }


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {
        **write_shared_experts(values, "num_shared_experts"),
        "num_expert_group": values["moe_router_num_groups"] or 1,
        "topk_group": values["moe_router_group_topk"] or 1,
        **write_delta_sizes(values),
        **write_moe_layers(values),
    }


CONFIG = ConfigTable(
    fields=(
        *(its for its in dense_fields(eps=1e-5) if its.mca not in ("kv_channels", "max_position_embeddings")),
        *LATENT_FIELDS,
        SCALED,
        Field("max_position_embeddings", "model_max_length", 1 << 20),
        Field("num_moe_experts", "num_experts", 256),
        Field("moe_router_topk", "num_experts_per_token", 8),
        Field("moe_ffn_hidden_size", "moe_intermediate_size", 1024),
    ),
    defaults={
        **{"num_key_value_heads": 32, "routed_scaling_factor": 2.446, "kv_lora_rank": 512},
        **{"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "pad_token_id": 163839},
        **{"n_shared_experts": 1, "n_group": 1, "topk_group": 1},
        **{"num_experts_per_tok": 8, "n_routed_experts": 256, "moe_intermediate_size": 1024},
    },
    constants={"qk_layernorm": True, "linear_channel_decay": True, **SIGMOID_ROUTER},
    fixed=(
        SILU,
        NO_ATTENTION_BIAS,
        Fixed("moe_renormalize", (True,), "Megatron normalizes sigmoid scores over the chosen experts"),
        Fixed("moe_router_activation_func", ("sigmoid",), "transformers ignores it"),
        Fixed("mla_use_nope", (True,), "transformers ignores it"),
    ),
    aliases=ALIASES,
    facts=(Lens(derive, write),),
)


SAVED_BY_HF = "hf_saved_by_transformers"


def detect_extra(config: McaModelConfig, names: Collection[str], shapes: Mapping[str, Shape]) -> Values:
    """Return whether transformers wrote the files: it gives the dense MLP the name of experts."""
    dense = (layer for layer in range(config.num_layers) if not config.is_moe_layer(layer))
    saved = any(f"model.layers.{layer}.{BLOCK}gate_proj.weight" in names for layer in dense)
    return {SAVED_BY_HF: True} if saved else {}


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    layers = delta_and_latent_attention(config, loaded=bool(config.extra.get("fused_experts")))
    mlps = list(mlp_layers(config, NAMES))
    if config.extra.get(SAVED_BY_HF) and not config.extra.get("fused_experts"):
        mlps = renamed(mlps, {".mlp.": f".{BLOCK}"})
    return [embedding(), *layers, *mlps, *head(config)]


FAMILY = Family(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    config=CONFIG,
    params=params,
    moe=NAMES,
    detect_extra=detect_extra,
    module_names={SAVED_BY_HF: False},
)
