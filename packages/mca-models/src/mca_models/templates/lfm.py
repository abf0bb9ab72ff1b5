"""LFM 2 and 3: gated short convolutions and attention."""

import math

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    ConfigTable,
    Field,
    Fixed,
    HfConfig,
    Lens,
    is_moe_layer,
)
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts.clip_tower import CLIP_SPELLINGS, siglip2_tower
from mca_models.templates.parts.common import dense_mlp, embedding, head
from mca_models.templates.parts.moe import (
    NORMALISED,
    SCALED,
    SIGMOID_ROUTER,
    SIGMOID_ROUTING,
    expert_fields,
    mlp_layers,
)
from mca_models.templates.parts.names import MoeNames
from mca_models.templates.parts.rope import FULL, PER_LAYER_TYPE, SLIDING, write_layer_types
from mca_models.templates.parts.short_convolution import (
    DEFAULTS,
    FIELDS,
    LAYER_TYPES,
    MODULES,
    NO_CONV_BIAS,
    lfm2_names,
    lfm3_names,
    mixers,
)
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    PROJECTOR,
    TOWER,
    NestedTextConfig,
    Shapes,
    Spelling,
    VisionModel,
    linear,
    module_spelling,
    norm,
)
from mca_models.templates.parts.vision_values import VisionValues, vision_values
from mca_models.weights import Param, expand_rules


# LFM2: HF `Lfm2ForCausalLM`: gated short convolutions in most layers, attention with QK-norm in the others.
def _lfm2_read(hf: HfConfig) -> JsonObject:
    """Derive the width of the MLP: two thirds of ``intermediate_size`` times a factor, rounded up to a multiple."""
    width = hf["intermediate_size"]
    if hf.get("block_auto_adjust_ff_dim", True):
        multiple = hf.get("block_multiple_of", 256)
        width = int(2 * width / 3)
        if (factor := hf.get("block_ffn_dim_multiplier", 1.0)) is not None:
            width = multiple * math.ceil(int(factor * width) / multiple)
    return {"ffn_hidden_size": width}


def _lfm2_write(values: Values) -> HfConfig:
    return {"intermediate_size": values["ffn_hidden_size"], "block_auto_adjust_ff_dim": False}


def _lfm2_params(config: McaModelConfig) -> list[Param]:
    mlps = expand_rules(dense_mlp(config), layers=range(config.num_layers))
    return lfm2_names([embedding(), *mixers(config), *mlps, *head(config)])


LFM2 = Family(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    config=ConfigTable(
        fields=FIELDS,
        defaults=DEFAULTS,
        constants={"qk_layernorm": True},
        fixed=(NO_CONV_BIAS,),
        aliases={"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
        facts=(LAYER_TYPES, Lens(_lfm2_read, _lfm2_write)),
    ),
    params=_lfm2_params,
)


# LFM2 MoE: HF `Lfm2MoeForCausalLM`: LFM2 with sigmoid routing and an expert bias after the first layers.
NAMES = MoeNames(
    router="feed_forward.gate.weight",
    router_bias="feed_forward.expert_bias",
    experts="feed_forward.experts.",
    gate="w1.weight",
    up="w3.weight",
    down="w2.weight",
)


def _moe_read(hf: HfConfig) -> JsonObject:
    """Derive the layers with experts: all but the first ``num_dense_layers``."""
    dense = hf.get("num_dense_layers", 2)
    return {"moe_layer_freq": tuple(int(layer >= dense) for layer in range(hf["num_hidden_layers"]))}


def _moe_write(values: Values) -> HfConfig:
    return {"num_dense_layers": sum(not is_moe_layer(values, layer) for layer in range(values["num_layers"]))}


def _moe_params(config: McaModelConfig) -> list[Param]:
    return lfm2_names([embedding(), *mixers(config), *mlp_layers(config, NAMES), *head(config)])


LFM2_MOE = Family(
    model_type="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    config=ConfigTable(
        fields=(*FIELDS, *expert_fields(count="num_experts", default=32), SCALED),
        defaults={**DEFAULTS, "num_experts_per_tok": 4, "moe_intermediate_size": 1792},
        constants={"qk_layernorm": True, **SIGMOID_ROUTER},
        fixed=(NO_CONV_BIAS, NORMALISED, Fixed("use_expert_bias", (True,), "all published models have it")),
        aliases={"tie_embedding": "tie_word_embeddings", "num_local_experts": "num_experts"},
        facts=(LAYER_TYPES, SIGMOID_ROUTING, Lens(_moe_read, _moe_write)),
    ),
    params=_moe_params,
    moe=NAMES,
)


# LFM3: HF `Lfm3ForCausalLM`: LFM2's convolutions, sliding windows with their own RoPE, a gate for each head.
def _lfm3_read(hf: HfConfig) -> JsonObject:
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


def _lfm3_write(values: Values) -> HfConfig:
    full = {"rope_theta": values["rotary_base"], **(values["rope_scaling"] or {})}
    local = {"rope_theta": values["rotary_base_local"], "rope_type": "default"}
    return {
        **write_layer_types(values),
        "rope_parameters": {FULL: full, SLIDING: local},
        "use_sandwich_norm": values["norm_placement"] == "sandwich",
    }


def _lfm3_params(config: McaModelConfig) -> list[Param]:
    mlps = expand_rules(dense_mlp(config), layers=range(config.num_layers))
    return lfm3_names(config, [embedding(), *mixers(config), *mlps, *head(config)])


LFM3 = Family(
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
        facts=(Lens(_lfm3_read, _lfm3_write),),
    ),
    params=_lfm3_params,
    module_names={MODULES: True},
)


# LFM2-VL: HF `Lfm2VlForConditionalGeneration`: SigLIP 2 on tiles, whose patches are merged into fewer, and LFM2.
def _lfm2_vl_tensors(config: McaModelConfig) -> Shapes:
    about, vision = vision_values(config)
    merged = vision.size("hidden_size", 768) * about.size("downsample_factor", 2) ** 2
    between = about.size("projector_hidden_size", 2560)
    biased, normed = about.flag("projector_bias", True), about.flag("projector_use_layernorm", True)
    return {
        **{TOWER + name: shape for name, shape in siglip2_tower(vision).items()},
        **(norm(f"{PROJECTOR}layer_norm", merged) if normed else {}),
        **linear(f"{PROJECTOR}linear_1", between, merged, bias=biased),
        **linear(f"{PROJECTOR}linear_2", config.hidden_size, between, bias=biased),
    }


def tokens_of_size(config: McaModelConfig, rows: int, columns: int) -> int:
    """Return the features of a tile of ``rows`` times ``columns`` patches."""
    factor = vision_values(config)[0].size("downsample_factor", 2)
    return int(rows // factor) * int(columns // factor)


LFM2_VL = vision_language_family(
    "lfm2_vl",
    "Lfm2VlForConditionalGeneration",
    {"lfm2": LFM2},
    VisionModel(
        tensors=_lfm2_vl_tensors,
        spellings=CLIP_SPELLINGS[2:],
        projector=(PROJECTOR,),
        unused=lambda config: (f"{TOWER}head.",),
        image_tokens="thumbnail_tiles",
        tokens_of_size=tokens_of_size,
    ),
    NestedTextConfig(tied=True, defaults={"image_token_id": 396}),
)


# LFM3-VL: HF `Lfm3VlForConditionalGeneration`: gated convolutions and attention over patches, and LFM3.
LFM3_VL_MODULES = module_spelling(TOWER, PROJECTOR)
PUBLISHED = Spelling(
    LFM3_VL_MODULES.text,
    LFM3_VL_MODULES.head,
    {f"{TOWER}patch_embed.": f"model.{TOWER}patchifier.", **LFM3_VL_MODULES.vision},
    ((".q_norm.", ".q_layernorm."), (".k_norm.", ".k_layernorm.")),
)


def layer(vision: VisionValues, kind: str) -> Shapes:
    """Return the tensors of a layer of the tower, with a convolution or with attention."""
    width, inner = vision.size("hidden_size", 1024), vision.size("intermediate_size", 2560)
    heads, kernel = vision.size("num_attention_heads", 16), vision.size("conv_kernel_size", 3)
    keys = width // heads * vision.size("num_key_value_heads", 8)
    if kind == "conv":
        mixer = {
            "conv.in_proj.weight": (3 * width, width),
            "conv.spatial_conv.weight": (width, 1, kernel, kernel),
            "conv.out_proj.weight": (width, width),
        }
    else:
        rows = {"q_proj": width, "k_proj": keys, "v_proj": keys, "out_proj": width}
        mixer = {f"self_attn.{name}.weight": (count, width) for name, count in rows.items()}
        mixer |= {f"self_attn.{x}_norm.weight": (width // heads,) for x in "qk"}
    mlp = {"w1": (inner, width), "w3": (inner, width), "w2": (width, inner)}
    return {
        **mixer,
        **{f"feed_forward.{name}.weight": shape for name, shape in mlp.items()},
        **norm("operator_norm", width, bias=False),
        **norm("ffn_norm", width, bias=False),
    }


def _lfm3_vl_tensors(config: McaModelConfig) -> Shapes:
    about, vision = vision_values(config)
    width, merge = vision.size("hidden_size", 1024), vision.size("spatial_merge_size", 2)
    between, biased = about.size("projector_hidden_size", 4096), about.flag("projector_bias", True)
    patch = vision.size("patch_size", 16) ** 2 * vision.size("temporal_patch_size", 2)
    count = vision.layers("num_hidden_layers", 14)
    usual = ["conv" if i < 2 or i % 2 else "full_attention" for i in range(count)]
    kinds = vision.kinds("layer_types", usual, "conv", "full_attention")
    return {
        f"{TOWER}patch_embed.weight": (width, vision.size("in_channels", 3) * patch),
        **norm(f"{TOWER}embedding_norm", width, bias=False),
        **{
            f"{TOWER}layers.{i}.{name}": shape
            for i, kind in enumerate(kinds)
            for name, shape in layer(vision, kind).items()
        },
        **norm(f"{PROJECTOR}layer_norm", width),
        **linear(f"{PROJECTOR}linear_1", between, width * merge**2, bias=biased),
        **linear(f"{PROJECTOR}linear_2", config.hidden_size, between, bias=biased),
    }


LFM3_VL = vision_language_family(
    "lfm3_vl",
    "Lfm3VlForConditionalGeneration",
    {"lfm3": LFM3},
    VisionModel(
        tensors=_lfm3_vl_tensors,
        spellings=(PUBLISHED, LFM3_VL_MODULES),
        projector=(PROJECTOR,),
        video_tokens="timestamps",
    ),
    NestedTextConfig(
        tied=True,
        defaults={
            **{"image_token_id": 125_030, "video_token_id": 125_029},
            **{"vision_start_token_id": 125_009, "vision_end_token_id": 125_010},
        },
    ),
)

FAMILIES = by_type(LFM2, LFM2_MOE, LFM3, LFM2_VL, LFM3_VL)
