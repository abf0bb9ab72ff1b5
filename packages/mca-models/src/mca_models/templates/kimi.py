"""Kimi Linear and Kimi K2.5."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates import get_family
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    SILU,
    ConfigTable,
    Field,
    Fixed,
    HfConfig,
    Lens,
    dense_fields,
)
from mca_models.templates.family import Family, by_type
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
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    TOWER,
    NestedTextConfig,
    Shapes,
    Spelling,
    VisionModel,
    linear,
    module_spelling,
    norm,
    repeat_shapes,
)
from mca_models.templates.parts.vision_values import vision_values
from mca_models.templates.shapes import Shape
from mca_models.weights import Param

# Kimi Linear: HF `KimiLinearForCausalLM`: Kimi delta attention, MLA without RoPE, experts.
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


def _write(values: Values) -> HfConfig:
    return {
        **write_shared_experts(values, "num_shared_experts"),
        "num_expert_group": values["moe_router_num_groups"] or 1,
        "topk_group": values["moe_router_group_topk"] or 1,
        **write_delta_sizes(values),
        **write_moe_layers(values),
    }


SAVED_BY_HF = "hf_saved_by_transformers"


def detect_extra(config: McaModelConfig, names: Collection[str], shapes: Mapping[str, Shape]) -> Values:
    """Return whether transformers wrote the files: it gives the dense MLP the name of experts."""
    dense = (layer for layer in range(config.num_layers) if not config.is_moe_layer(layer))
    saved = any(f"model.layers.{layer}.{BLOCK}gate_proj.weight" in names for layer in dense)
    return {SAVED_BY_HF: True} if saved else {}


def _params(config: McaModelConfig) -> list[Param]:
    layers = delta_and_latent_attention(config, loaded=bool(config.extra.get("fused_experts")))
    mlps = list(mlp_layers(config, NAMES))
    if config.extra.get(SAVED_BY_HF) and not config.extra.get("fused_experts"):
        mlps = renamed(mlps, {".mlp.": f".{BLOCK}"})
    return [embedding(), *layers, *mlps, *head(config)]


KIMI_LINEAR = Family(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    config=ConfigTable(
        fields=(
            *(
                its
                for its in dense_fields(eps=1e-5)
                if its.mca not in ("kv_channels", "max_position_embeddings")
            ),
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
        facts=(Lens(derive, _write),),
    ),
    params=_params,
    moe=NAMES,
    detect_extra=detect_extra,
    module_names={SAVED_BY_HF: False},
)


# Kimi K2.5, K2.6: HF `Kimi_K25ForConditionalGeneration`: MoonViT with fused q, k and v, and the text model of K2.
_PROJECTOR = "mm_projector."
_FILES = Spelling(
    "language_model.model.",
    "language_model.lm_head.",
    {
        f"{TOWER}layers.": f"{TOWER}encoder.blocks.",
        f"{TOWER}final_layernorm.": f"{TOWER}encoder.final_layernorm.",
        f"{TOWER}patch_embed.pos_emb.position_embeddings": f"{TOWER}patch_embed.pos_emb.weight",
        f"{_PROJECTOR}in_proj.": f"{_PROJECTOR}proj.0.",
        f"{_PROJECTOR}out_proj.": f"{_PROJECTOR}proj.2.",
        TOWER: TOWER,
        _PROJECTOR: _PROJECTOR,
    },
    (
        *(
            (".norm1.", ".norm0."),
            (".norm2.", ".norm1."),
            (".mlp.fc1.", ".mlp.fc0."),
            (".mlp.fc2.", ".mlp.fc1."),
        ),
        *((".attn.proj.", ".wo."), (".attn.wqkv.", ".wqkv.")),
    ),
)
_SAVED = replace(  # by transformers 5.23, which reads both
    _FILES,
    vision={
        **dict(list(_FILES.vision.items())[:-2]),
        f"{TOWER}patch_embed.proj.": f"{TOWER}encoder.patch_embed.proj.",
        f"{_PROJECTOR}pre_norm.": f"model.{_PROJECTOR}pre_norm.",
    },
    layers="blocks.",
)
_TOKENS = {
    **{"image_token_id": 163605, "video_token_id": 163840},
    **{"vision_start_token_id": 163602, "vision_end_token_id": 163604},
}


def _tensors(config: McaModelConfig) -> Shapes:
    about, vision = vision_values(config)
    width, inner = vision.size("hidden_size", 1152), vision.size("intermediate_size", 4304)
    high, wide = vision.sides("patch_size", 14)
    rows, columns = vision.sides("merge_kernel_size", 2)
    merged = width * rows * columns
    layer = {
        **norm("norm1", width),
        **norm("norm2", width),
        **linear("attn.proj", width, width),
        **linear("attn.wqkv", 3 * width, width),
        **linear("mlp.fc1", inner, width),
        **linear("mlp.fc2", width, inner),
    }
    positions = (vision.size("pos_emb_height", 64), vision.size("pos_emb_width", 64), width)
    tower = {
        "patch_embed.proj.weight": (width, 3, high, wide),
        "patch_embed.proj.bias": (width,),
        "patch_embed.pos_emb.position_embeddings": positions,
        **norm("final_layernorm", width),
        **repeat_shapes("layers", vision.layers("num_hidden_layers", 27), layer),
    }
    return {
        **{TOWER + name: shape for name, shape in tower.items()},
        **norm(f"{_PROJECTOR}pre_norm", about.size("projection_hidden_size", 1152)),
        **linear(f"{_PROJECTOR}in_proj", merged, merged),
        **linear(f"{_PROJECTOR}out_proj", config.hidden_size, merged),
    }


KIMI_K25 = vision_language_family(
    "kimi_k25",
    "Kimi_K25ForConditionalGeneration",
    {kind: get_family(kind) for kind in ("deepseek_v3", "kimi_k2")},
    VisionModel(
        tensors=_tensors,
        spellings=(_FILES, _SAVED, module_spelling(TOWER, _PROJECTOR)),
        projector=(_PROJECTOR,),
        image_tokens="padded_patches",
        fused_qkv="rope pairs",
    ),
    NestedTextConfig(tied=True, defaults=_TOKENS),
    assumed=True,
)

FAMILIES = by_type(KIMI_LINEAR, KIMI_K25)
