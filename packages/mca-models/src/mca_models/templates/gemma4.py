"""Gemma 4: the text models, and those with a vision and an audio tower."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace

from mca_config.errors import HfConfigError
from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.printable import counted
from mca_config.types import JsonObject, Typed, Values
from mca_models.templates.config_table import (
    GELU,
    GELU_ONLY,
    NO_ATTENTION_BIAS,
    ConfigTable,
    Field,
    Fixed,
    HfConfig,
    Lens,
    dense_fields,
)
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts.common import (
    MLP,
    attention,
    dense_layers,
    down,
    embedding,
    gate_up,
    head,
    in_layers,
    inner,
)
from mca_models.templates.parts.names import HF, HF_ATTN, HF_MLP
from mca_models.templates.parts.rope import FULL, PER_LAYER_TYPE, SLIDING, write_layer_types
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    TOWER,
    AudioTower,
    NestedTextConfig,
    Shapes,
    Spelling,
    VisionModel,
    linear,
    module_spelling,
    norm,
    repeat_shapes,
)
from mca_models.templates.parts.vision_values import VisionValues, audio_values, vision_values
from mca_models.templates.shapes import Shape
from mca_models.weights import COLUMN, GATED, ROW, Param, Stage, expand_rules

BIDIRECTIONAL = "use_bidirectional_attention"
GEMMA4_TOKENS: Values = {
    **{"image_token_id": 258_880, "video_token_id": 258_884, "audio_token_id": 258_881},
    **{"boi_token_id": 255_999, "eoi_token_id": 258_882, "boa_token_id": 256_000, "eoa_token_index": 258_883},
}
"""Default ids of placeholders, and of the marks around an image and a clip."""
CLIP_MARKS = ("boa_token_id", "eoa_token_index")
"""Keys of the marks around a clip."""
MOST_TOKENS = 1120
"""Most tokens of an image that Gemma 4's processors allow."""


def image_reach(config: McaModelConfig) -> int:
    """Return how many later tokens an image token attends to at most."""
    return MOST_TOKENS - 1 if given(config.vision).bidirectional_images else 0


def bidirectional_images(default: str | None) -> Lens:
    """Return the lens on bidirectional attention inside images; ``default`` is the value of an absent key."""
    return Lens(
        lambda hf: {"bidirectional_images": hf.get(BIDIRECTIONAL, default) == "vision"},
        lambda values: {BIDIRECTIONAL: "vision" if values["bidirectional_images"] else None},
    )


# Gemma 4, the text model: HF `Gemma4ForCausalLM`: wider heads in full-attention layers, which may have K = V.
# In E2B and E4B each layer has per-layer embeddings; late layers share the keys and values of earlier ones.
logger = logging.getLogger(__name__)
ROWS = 262_144
"""Tokens with embeddings for all layers, where ``config.json`` does not say it."""
NORMS = {
    "dense_layernorm": "pre_feedforward_layernorm",
    "dense_post_layernorm": "post_feedforward_layernorm_1",
    "experts_layernorm": "pre_feedforward_layernorm_2",
    "experts_post_layernorm": "post_feedforward_layernorm_2",
    "post_layernorm": "post_feedforward_layernorm",
}
"""Norms of an MLP and of the experts parallel to it."""
EXPERTS = [
    Param(
        mca=f"{MLP}experts.linear_fc{number}.weight{{expert}}",
        hf=(f"{HF}experts.{name}",),
        shard=shard,
        stacked=True,
    )
    for number, name, shard in ((1, "gate_up_proj", GATED), (2, "down_proj", ROW))
]
PER_LAYER = [
    inner("per_layer_gate.weight", "per_layer_input_gate.weight"),
    inner("per_layer_projection.weight", "per_layer_projection.weight"),
    inner("per_layer_layernorm.weight", "post_per_layer_input_norm.weight"),
]
"""Rules of per-layer embeddings."""
PER_LAYER_TABLES = [
    Param(
        mca="embedding.per_layer_embeddings.weight",
        hf=("model.embed_tokens_per_layer.weight",),
        shard=COLUMN,
        stage=Stage.FIRST,
        vocab=True,
    ),
    Param(
        mca="embedding.per_layer_projection.weight",
        hf=("model.per_layer_model_projection.weight",),
        stage=Stage.FIRST,
    ),
    Param(
        mca="embedding.per_layer_layernorm.weight",
        hf=("model.per_layer_projection_norm.weight",),
        stage=Stage.FIRST,
    ),
]
"""Parameters that all layers share."""


class _Size(Field):
    """A size that ``null`` does not stand for."""

    def read(self, hf: Values) -> Typed:
        """Read the value, as `Field.read`."""
        value = hf.get(self.hf, self.default)
        if type(value) is not int:
            raise HfConfigError(
                f"config.json: '{self.hf}' is {value!r:.80}; supported: a number, 0 for none (transformers takes "
                f"nothing else); left out it is {self.default}"
            )
        return value


def derive(hf: HfConfig) -> JsonObject:
    """Kinds of layers, their heads and ropes, and the scale of embeddings."""
    rows, vocabulary = hf.get("vocab_size_per_layer_input", ROWS), hf["vocab_size"]
    if hf.get("hidden_size_per_layer_input") and rows != vocabulary:
        raise HfConfigError(
            f"config.json: 'vocab_size_per_layer_input' is {rows!r:.80}; supported: the vocab_size {vocabulary} "
            "(each token has embeddings for all layers)"
        )
    count = hf["num_hidden_layers"]
    kinds = hf.get("layer_types") or [SLIDING if (i + 1) % 6 else FULL for i in range(count)]
    kinds = [*kinds[:-1], FULL]  # transformers has the last one see everything
    ropes = hf.get("rope_parameters") or {}
    full, local = ropes.get(FULL) or {}, ropes.get(SLIDING) or {}
    share = full.get("partial_rotary_factor", 1.0 if full else 0.25)
    turning = {"rope_type": "proportional", "partial_rotary_factor": share}
    Fixed("rope_type", ("proportional",), "RoPE of full layers").check(full)
    Fixed("rope_type", ("default",), "RoPE of sliding-window layers").check(local)
    shared = bool(hf.get("attention_k_eq_v"))
    groups = hf.get("num_global_key_value_heads") if shared else None
    own = {"kv_channels": hf.get("global_head_dim", 512), "values_are_keys": shared}
    own |= {"num_query_groups": groups or hf.get("num_key_value_heads", 4)}
    if "per_layer_config" in hf:  # transformers then asks for no global sizes, and writes what differs alone
        by_layer = hf["per_layer_config"] or {}
        overrides = (its for layer, its in by_layer.items() if kinds[int(layer)] == FULL)
        said: JsonObject = next(overrides, {})
        own |= {"kv_channels": said.get("head_dim", hf.get("head_dim", 256))}
        own |= {"num_query_groups": said.get("num_key_value_heads", hf.get("num_key_value_heads", 4))}
    return {
        **_experts(hf),
        "layer_types": tuple(kinds),
        "layer_type_overrides": {FULL: own},
        "rotary_base": float(full.get("rope_theta", 1e6)),
        "rotary_base_local": float(local.get("rope_theta", 1e4)),
        "rope_scaling": {**turning, **({"factor": full["factor"]} if "factor" in full else {})},
        "embedding_multiplier": hf["hidden_size"] ** 0.5,
    }


def _experts(hf: HfConfig) -> JsonObject:
    """26B A4B: experts parallel to the MLP."""
    if not hf.get("enable_moe_block"):
        return {}
    Fixed(
        "use_double_wide_mlp", (False, None), "no published model has experts and MLPs of two widths"
    ).check(hf)
    return {
        **{"num_moe_experts": hf["num_experts"], "moe_ffn_hidden_size": hf["moe_intermediate_size"]},
        **{"moe_router_topk": hf["top_k_experts"], "moe_parallel_dense_mlp": True},
        "moe_shared_expert_intermediate_size": hf["intermediate_size"],
    }


def _write(values: Values) -> HfConfig:
    own = (values["layer_type_overrides"] or {})[FULL]
    full = {"rope_theta": values["rotary_base"], **(values["rope_scaling"] or {})}
    local = {"rope_theta": values["rotary_base_local"], "rope_type": "default"}
    sizes = {"global_head_dim": own["kv_channels"], "num_global_key_value_heads": own["num_query_groups"]}
    shared = {
        "attention_k_eq_v": own["values_are_keys"],
        "hidden_activation": GELU,
        **write_layer_types(values),
    }
    experts = {
        "num_experts": values["num_moe_experts"],
        "moe_intermediate_size": values["moe_ffn_hidden_size"],
    }
    if values["moe_parallel_dense_mlp"]:
        shared |= {**experts, "top_k_experts": values["moe_router_topk"], "enable_moe_block": True}
    return {**shared, **sizes, "rope_parameters": {FULL: full, SLIDING: local}}


FIELDS = (
    *dense_fields(tied=True),
    Field("window_size", "sliding_window", 512),
    Field("final_logit_softcapping", "final_logit_softcapping", None),
    Field("num_kv_shared_layers", "num_kv_shared_layers", 0),
    Field("double_wide_mlp", "use_double_wide_mlp", False),
)


def parallel_experts(config: McaModelConfig) -> list[Param]:
    """Return the rules of a layer's MLP and of the parallel router."""
    mlp, norms = f"{MLP}shared_experts.", NORMS.items()
    return [
        gate_up(mlp, HF_MLP),
        down(mlp, HF_MLP),
        *(inner(f"mlp.{mca}.weight", f"{hf}.weight") for mca, hf in norms),
        inner("mlp.router.weight", "router.proj.weight"),
        inner("mlp.router_scale", "router.scale"),
        inner("mlp.expert_scale", "router.per_expert_scale"),
    ]


def _params(config: McaModelConfig) -> list[Param]:
    layers = range(config.num_layers)
    scalars = [
        inner("layer_scalar", "layer_scalar"),
        *(PER_LAYER if config.per_layer_embedding is not None else []),
    ]
    rules = [
        *(PER_LAYER_TABLES if config.per_layer_embedding is not None else []),
        *expand_rules(scalars, layers=layers),
    ]
    if config.moe is None:
        return [*dense_layers(config), *rules]
    blocks = in_layers(config, lambda own: [*attention(own), *parallel_experts(own)])
    stacked = expand_rules(EXPERTS, layers=layers, experts=range(config.num_experts))
    return [embedding(), *blocks, *stacked, *rules, *head(config)]


def unused_keys(config: McaModelConfig, names: Collection[str], shapes: Mapping[str, Shape]) -> Values:
    """The projections and norms of keys and values in layers that take another's, which transformers passes over."""
    takers = [layer for layer in range(config.num_layers) if config.kv_source_layer(layer) is not None]
    parts = ("k_proj", "v_proj", "k_norm", "v_norm")
    known = {f"{HF_ATTN}{part}.weight".format(layer=layer) for layer in takers for part in parts}
    left = sorted(known.intersection(names))
    if left:
        logger.warning(
            "not read or exported: %s of keys and values (%s, ...), whose layers use those of earlier layers",
            counted(len(left), "tensor"),
            left[0],
        )
    return {"hf_left_behind": left} if left else {}


def left_behind(config: McaModelConfig) -> frozenset[str]:
    """Return the tensors that ``unused_keys`` detected."""
    return frozenset(config.extra.get("hf_left_behind", ()))


GEMMA4_TEXT = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    config=ConfigTable(
        fields=(
            Field(
                "vocab_size", "vocab_size_per_layer_input", ROWS
            ),  # which `derive` compares with the other one
            _Size("per_layer_input_size", "hidden_size_per_layer_input", 256),
            *FIELDS,
        ),
        defaults={"head_dim": 256, "num_key_value_heads": 4, "pad_token_id": 0},
        constants={
            **{"hidden_act": GELU, "norm_placement": "sandwich", "qk_layernorm": True},
            **{"softmax_scale": 1.0, "value_norm": True, "layer_scalar": True},
        },
        fixed=(
            NO_ATTENTION_BIAS,
            GELU_ONLY,
            PER_LAYER_TYPE,
            Fixed(BIDIRECTIONAL, (None, "vision"), "Megatron's decoder is causal"),
        ),
        facts=(Lens(derive, _write), bidirectional_images(None)),
    ),
    params=_params,
    ignored_hf=left_behind,
    detect_extra=unused_keys,
)


# Gemma 4: HF `Gemma4ForConditionalGeneration`: a tower that pools patches, an audio tower (E2B, E4B), and text.
AUDIO = ("audio_tower.", "embed_audio.")
_GEMMA4_PROJECTOR = "embed_vision."
_GEMMA4_PROJECTION = "embedding_projection"
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


def _clipped(name: str, rows: int, columns: int, clips: bool) -> Shapes:
    """Return a linear, and its bounds if it clips."""
    bounds: Shapes = {f"{name}.{bound}": () for bound in _BOUNDS} if clips else {}
    return {**linear(f"{name}.linear", rows, columns, bias=False), **bounds}


def _norms(width: int, *names: str) -> Shapes:
    return {name: shape for each in names for name, shape in norm(each, width, bias=False).items()}


def gemma4_vision_tower(vision: VisionValues) -> Shapes:
    """Return the tensors of ``gemma4_vision``."""
    width, inner = vision.size("hidden_size", 768), vision.size("intermediate_size", 3072)
    head, clips = vision.size("head_dim", 64), vision.flag("use_clipped_linears", False)
    heads = vision.size("num_attention_heads", 12) * head
    groups = vision.size("num_key_value_heads", 12) * head
    layer = {
        **_clipped("self_attn.q_proj", heads, width, clips),
        **_clipped("self_attn.k_proj", groups, width, clips),
        **_clipped("self_attn.v_proj", groups, width, clips),
        **_clipped("self_attn.o_proj", width, heads, clips),
        **_norms(head, "self_attn.q_norm", "self_attn.k_norm"),
        **_clipped("mlp.gate_proj", inner, width, clips),
        **_clipped("mlp.up_proj", inner, width, clips),
        **_clipped("mlp.down_proj", width, inner, clips),
        **_norms(width, "input_layernorm", "post_attention_layernorm"),
        **_norms(width, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    }
    moments: Shapes = {"std_bias": (width,), "std_scale": (width,)}
    return {
        **linear("patch_embedder.input_proj", width, 3 * vision.size("patch_size", 16) ** 2, bias=False),
        "patch_embedder.position_embedding_table": (2, vision.size("position_embedding_size", 10240), width),
        **repeat_shapes("encoder.layers", vision.layers("num_hidden_layers", 16), layer),
        **(moments if vision.flag("standardize", False) else {}),
    }


def gemma4_audio_tower(audio: VisionValues) -> Shapes:
    """Return the tensors of ``gemma4_audio``."""
    width, clips = audio.size("hidden_size", 1024), audio.flag("use_clipped_linears", True)
    first, second = audio.sides("subsampling_conv_channels", (128, 32))
    layer = {
        **{name: shape for half in (1, 2) for name, shape in _feed_forward(half, width, clips).items()},
        "self_attn.per_dim_scale": (width // audio.size("num_attention_heads", 8),),
        **linear("self_attn.relative_k_proj", width, width, bias=False),
        **_clipped("lconv1d.linear_start", 2 * width, width, clips),
        **_clipped("lconv1d.linear_end", width, width, clips),
        "lconv1d.depthwise_conv1d.weight": (width, 1, audio.size("conv_kernel_size", 5)),
        **_norms(width, "lconv1d.pre_layer_norm", "lconv1d.conv_norm"),
        **_norms(width, "norm_pre_attn", "norm_post_attn", "norm_out"),
    }
    for x in ("q_proj", "k_proj", "v_proj", "post"):
        layer |= _clipped(f"self_attn.{x}", width, width, clips)
    convolved = "subsample_conv_projection"
    return {
        f"{convolved}.layer0.conv.weight": (first, 1, 3, 3),
        **_norms(first, f"{convolved}.layer0.norm"),
        f"{convolved}.layer1.conv.weight": (second, first, 3, 3),
        **_norms(second, f"{convolved}.layer1.norm"),
        **linear(f"{convolved}.input_proj_linear", width, (first // 4) * second, bias=False),
        **repeat_shapes("layers", audio.layers("num_hidden_layers", 12), layer),
        **linear("output_proj", audio.size("output_proj_dims", 1536), width),
    }


def _feed_forward(half: int, width: int, clips: bool) -> Shapes:
    name = f"feed_forward{half}"
    return {
        **_clipped(f"{name}.ffw_layer_1", 4 * width, width, clips),
        **_clipped(f"{name}.ffw_layer_2", width, 4 * width, clips),
        **_norms(width, f"{name}.pre_layer_norm", f"{name}.post_layer_norm"),
    }


def _gemma4_tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of the towers and their projectors."""
    _, vision = vision_values(config)
    found = {
        **{TOWER + name: shape for name, shape in gemma4_vision_tower(vision).items()},
        **linear(
            _GEMMA4_PROJECTOR + _GEMMA4_PROJECTION,
            config.hidden_size,
            vision.size("hidden_size", 768),
            bias=False,
        ),
    }
    if (audio := audio_values(config)) is not None:
        tower, projector = AUDIO
        found |= {tower + name: shape for name, shape in gemma4_audio_tower(audio).items()}
        width = audio.size("output_proj_dims", 1536)
        found |= linear(projector + _GEMMA4_PROJECTION, config.hidden_size, width, bias=False)
    return found


GEMMA4 = vision_language_family(
    "gemma4",
    "Gemma4ForConditionalGeneration",
    {"gemma4_text": GEMMA4_TEXT},
    VisionModel(
        tensors=_gemma4_tensors,
        spellings=(module_spelling(TOWER, _GEMMA4_PROJECTOR, *AUDIO),),
        projector=(_GEMMA4_PROJECTOR, AUDIO[1]),
        image_tokens="pooled",
        video_tokens="minutes",
        reach=image_reach,
        windowed=True,
        audio=AudioTower(
            names=AUDIO,
            mask="input_features_mask",
            tokens=lambda config, frames: -(-frames // 4),
            marks=CLIP_MARKS,
        ),
    ),
    NestedTextConfig(tied=True, defaults=GEMMA4_TOKENS),
)


# Gemma 4 12B, the text model: HF `Gemma4UnifiedForCausalLM`: Gemma 4 with another default window.
GEMMA4_UNIFIED_TEXT = replace(
    GEMMA4_TEXT,
    model_type="gemma4_unified_text",
    architecture="Gemma4UnifiedForCausalLM",
    config=replace(
        GEMMA4_TEXT.table,
        fields=tuple(field for field in GEMMA4_TEXT.table.fields if not field.hf.endswith("per_layer_input")),
        fixed=(
            *GEMMA4_TEXT.table.fixed,
            Fixed("hidden_size_per_layer_input", (0, False, None), "transformers ignores it in this family"),
        ),
        facts=(*GEMMA4_TEXT.table.facts, bidirectional_images("vision")),
        defaults={"head_dim": 256, "num_key_value_heads": 4, "pad_token_id": 0, "sliding_window": 1024},
    ),
)


# Gemma 4 12B: HF `Gemma4UnifiedForConditionalGeneration`: projected patches and waveforms, and the text model.
_VISION, _AUDIO = "embed_vision.", "embed_audio."
_UNIFIED_PROJECTOR = f"{_VISION}multimodal_embedder."
_UNIFIED_PROJECTION = "embedding_projection"
PUBLISHED = Spelling(
    "model.language_model.",
    "lm_head.",
    {_UNIFIED_PROJECTOR: f"model.{_VISION}", _VISION: "model.vision_embedder.", _AUDIO: f"model.{_AUDIO}"},
)


def _unified_tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of the projectors."""
    _, vision = vision_values(config)
    width = vision.size("mm_embed_dim", 3840)
    pixels = 3 * (vision.size("patch_size", 16) * vision.size("pooling_kernel_size", 3)) ** 2
    found = {
        **norm(f"{_VISION}patch_ln1", pixels),
        **linear(f"{_VISION}patch_dense", width, pixels),
        **norm(f"{_VISION}patch_ln2", width),
        f"{_VISION}pos_embedding": (vision.size("mm_posemb_size", 1120), 2, width),
        **norm(f"{_VISION}pos_norm", width),
        **linear(
            _UNIFIED_PROJECTOR + _UNIFIED_PROJECTION,
            config.hidden_size,
            vision.size("output_proj_dims", 3840),
            bias=False,
        ),
    }
    if (audio := audio_values(config)) is not None:
        found |= linear(
            _AUDIO + _UNIFIED_PROJECTION, config.hidden_size, audio.size("audio_embed_dim", 640), bias=False
        )
    return found


GEMMA4_UNIFIED = vision_language_family(
    "gemma4_unified",
    "Gemma4UnifiedForConditionalGeneration",
    {"gemma4_unified_text": GEMMA4_UNIFIED_TEXT},
    VisionModel(
        tensors=_unified_tensors,
        spellings=(PUBLISHED, module_spelling(_VISION, _AUDIO)),
        projector=(_UNIFIED_PROJECTOR, _AUDIO),
        image_tokens="pooled",
        video_tokens="minutes",
        reach=image_reach,
        audio=AudioTower(
            names=(_AUDIO,),
            mask="input_features_mask",
            tokens=lambda config, frames: frames,
            marks=CLIP_MARKS,
        ),
    ),
    NestedTextConfig(tied=True, defaults=GEMMA4_TOKENS),
)

FAMILIES = by_type(GEMMA4_TEXT, GEMMA4, GEMMA4_UNIFIED_TEXT, GEMMA4_UNIFIED)
