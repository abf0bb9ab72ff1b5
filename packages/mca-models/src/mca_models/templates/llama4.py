"""Llama 4: the text model, and with a vision tower."""

from dataclasses import replace
from functools import partial

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    SILU,
    ConfigTable,
    Field,
    Fixed,
    HfConfig,
    Lens,
    dense_fields,
    is_moe_layer,
)
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts.common import renamed
from mca_models.templates.parts.moe import NO_JITTER, TRANSPOSED, moe_params
from mca_models.templates.parts.names import TRANSPOSED_EXPERTS, MoeNames
from mca_models.templates.parts.rope import FULL, write_layer_types
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    PROJECTOR,
    NestedTextConfig,
    Shapes,
    VisionModel,
    linear,
    llava_spelling,
    norm,
    repeat_shapes,
)
from mca_models.templates.parts.vision_values import vision_values
from mca_models.weights import Param

# Llama 4, the text model: HF `Llama4ForCausalLM`: chunked attention, NoPE layers, top-1 routing.
NAMES = MoeNames(router="mlp.router.weight", shared="mlp.shared_expert.")
CHUNKED = "chunked_attention"


def derive(hf: HfConfig) -> JsonObject:
    """Layers with RoPE (which HF lists under ``no_rope_layers``), with chunks, with experts."""
    count, step = hf["num_hidden_layers"], hf.get("interleave_moe_layer_step", 1)
    every = hf.get("no_rope_layer_interval", 4)
    rotated = hf.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]
    sparse = hf.get("moe_layers")
    heat = {"beta": hf.get("attn_scale", 0.1), "length": hf.get("floor_scale", 8192), "first": 1}
    norms = bool(hf.get("use_qk_norm", True))
    return {
        "no_rope_freq": tuple(1 - int(yes) for yes in rotated),
        "layer_types": tuple(hf.get("layer_types") or [CHUNKED if yes else FULL for yes in rotated]),
        "moe_layer_freq": tuple(
            int(i in (range(step - 1, count, step) if sparse is None else sparse)) for i in range(count)
        ),
        "attn_temperature": heat if hf.get("attn_temperature_tuning", True) else None,
        **dict.fromkeys(("qk_layernorm", "qk_layernorm_after_rope"), norms),
    }


def _write(values: Values) -> HfConfig:
    heat = values["attn_temperature"]
    scales = {"attn_scale": heat["beta"], "floor_scale": heat["length"]} if heat else {}
    return {
        "no_rope_layers": [1 - skip for skip in values["no_rope_freq"] or ()],
        "moe_layers": [layer for layer in range(values["num_layers"]) if is_moe_layer(values, layer)],
        "use_qk_norm": values["qk_layernorm"],
        "attn_temperature_tuning": heat is not None,
        **{**scales, **write_layer_types(values)},
    }


def _params(config: McaModelConfig) -> list[Param]:
    stacked = replace(config, extra={**config.extra, "fused_experts": True, TRANSPOSED: True})
    return renamed(moe_params(stacked, NAMES), {"mlp.": "feed_forward."})


LLAMA4_TEXT = Family(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    config=ConfigTable(
        fields=(
            *(field for field in dense_fields(eps=1e-5) if field.mca != "ffn_hidden_size"),
            Field("ffn_hidden_size", "intermediate_size_mlp"),
            Field("num_moe_experts", "num_local_experts", 16),
            Field("moe_ffn_hidden_size", "intermediate_size"),
            Field("moe_shared_expert_intermediate_size", "intermediate_size"),
            Field("attention_chunk_size", "attention_chunk_size", 8192),
        ),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 5e5,
            "intermediate_size_mlp": 16384,
        },
        constants={
            "rotary_interleaved": True,
            "qk_layernorm_weight": False,
            "moe_router_score_function": "sigmoid",
            "moe_router_topk": 1,
            "moe_apply_probs_on_input": True,
        },
        fixed=(
            *(SILU, NO_ATTENTION_BIAS, NO_JITTER),
            Fixed("num_experts_per_tok", (1,), "Megatron weighs the input of a single expert only"),
        ),
        facts=(Lens(derive, _write),),
    ),
    params=_params,
    unadaptable=frozenset({"router"}),
    transposed_experts=True,
    fp8_unsupported=TRANSPOSED_EXPERTS,
)


# Llama 4: HF `Llama4ForConditionalGeneration`: a tower with a class token and pixel shuffle, and the text model.
_TOWER = "vision_model."
_linear = partial(linear, bias=False)


def _tensors(config: McaModelConfig) -> Shapes:
    _, vision = vision_values(config)
    width, inner = vision.size("hidden_size", 768), vision.size("intermediate_size", 5632)
    patch, between = vision.size("patch_size", 14), vision.size("projector_input_dim", 4096)
    out = vision.size("projector_output_dim", 4096)
    layer = {
        **norm("input_layernorm", width),
        **norm("post_attention_layernorm", width),
        **linear("mlp.fc1", inner, width),
        **linear("mlp.fc2", width, inner),
    }
    for x in "qkvo":
        layer |= linear(f"self_attn.{x}_proj", width, width)
    tower = {
        "class_embedding": (width,),
        "positional_embedding_vlm": ((vision.size("image_size", 448) // patch) ** 2 + 1, width),
        **_linear("patch_embedding.linear", width, vision.size("num_channels", 3) * patch**2),
        **norm("layernorm_pre", width),
        **norm("layernorm_post", width),
        **repeat_shapes("model.layers", vision.layers("num_hidden_layers", 34), layer),
        **_linear("vision_adapter.mlp.fc1", between, inner),
        **_linear("vision_adapter.mlp.fc2", out, out),
    }
    return {
        **{_TOWER + name: shape for name, shape in tower.items()},
        **_linear(f"{PROJECTOR}linear_1", config.hidden_size, vision.size("vision_output_dim", 7680)),
    }


def tokens_per_image(config: McaModelConfig) -> int:
    """Return the features of a tile: its patches, shuffled into fewer."""
    _, vision = vision_values(config)
    side = vision.size("image_size", 448) // vision.size("patch_size", 14)
    return int(side * vision.factor("pixel_shuffle_ratio", 0.5)) ** 2


LLAMA4 = vision_language_family(
    "llama4",
    "Llama4ForConditionalGeneration",
    {"llama4_text": LLAMA4_TEXT},
    VisionModel(
        tensors=_tensors,
        spellings=(llava_spelling(_TOWER, PROJECTOR),),
        projector=(PROJECTOR,),
        image_tokens="tile_rows",
        tokens_per_image=tokens_per_image,
    ),
    NestedTextConfig(text_ties="alone"),
)

FAMILIES = by_type(LLAMA4_TEXT, LLAMA4)
