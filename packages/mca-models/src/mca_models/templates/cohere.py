"""Cohere's Command R and A: parallel attention and MLP after one norm."""

from dataclasses import replace
from functools import partial

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    SILU,
    ConfigTable,
    Field,
    HfConfig,
    Lens,
    dense_fields,
    norm_epsilon,
    read_rope,
)
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts.clip_tower import CLIP_SPELLINGS, shuffled_tokens, siglip_tower, unused_states
from mca_models.templates.parts.common import dense_layers
from mca_models.templates.parts.moe import (
    expert_fields,
    moe_params,
    require_sigmoid_routing,
    write_moe_layers,
    write_shared_experts,
)
from mca_models.templates.parts.names import MoeNames
from mca_models.templates.parts.rope import FULL, SLIDING, write_layer_types
from mca_models.templates.parts.sliding_window import rotated_windows, window_pattern
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    PROJECTOR,
    TOWER,
    NestedTextConfig,
    Shapes,
    VisionModel,
    linear,
    norm,
)
from mca_models.templates.parts.vision_values import vision_values


def read_logit_scale(hf: HfConfig) -> JsonObject:
    """The factor on logits, by which this family multiplies."""
    return {"logits_scaling": 1 / hf.get("logit_scale", 0.0625)}


LOGIT_SCALE = Lens(read_logit_scale, lambda values: {"logit_scale": 1 / values["logits_scaling"]})


# Command R: HF `CohereForCausalLM`: parallel attention and MLP after one LayerNorm without a bias.
def _cohere_derive(hf: HfConfig) -> JsonObject:
    """The factor on logits, and the norms of q and k."""
    own = bool(hf.get("use_qk_norm", False))
    return {"qk_layernorm": own, "qk_layernorm_per_head": own, **read_logit_scale(hf)}


def _cohere_write(values: Values) -> HfConfig:
    return {"logit_scale": 1 / values["logits_scaling"], "use_qk_norm": values["qk_layernorm"]}


COHERE = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    config=ConfigTable(
        fields=norm_epsilon(dense_fields(tied=True, eps=1e-5), "layer_norm_eps"),
        defaults={"pad_token_id": 0, "rope_theta": 5e5},
        constants={
            **{"normalization": "LayerNorm", "norm_bias": False},
            **{"parallel_block": "one_norm", "rotary_interleaved": True},
        },
        fixed=(SILU, NO_ATTENTION_BIAS),
        facts=(Lens(_cohere_derive, _cohere_write),),
    ),
    params=dense_layers,
)


# Command A and R7B: HF `Cohere2ForCausalLM`: Command R, RoPE only in sliding-window layers.
def _cohere2_derive(hf: HfConfig) -> JsonObject:
    """Kinds of layers."""
    return rotated_windows(hf.get("layer_types") or window_pattern(hf))


COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    config=replace(
        COHERE.table,
        fields=(*COHERE.table.fields, Field("window_size", "sliding_window", 4096)),
        defaults={"pad_token_id": 0},
        facts=(LOGIT_SCALE, Lens(_cohere2_derive, write_layer_types)),
    ),
)


# Command A with experts: HF `Cohere2MoeForCausalLM`: experts parallel to attention, dense first layers.
NAMES = MoeNames()


def _moe_derive(hf: HfConfig) -> JsonObject:
    """Kinds of layers, which have experts, their weights, the norms, and the factor on logits."""
    score = hf.get("expert_selection_fn", "softmax")
    normalised = score == "softmax" or hf.get("norm_topk_prob", True)
    if score == "sigmoid" and normalised:
        require_sigmoid_routing(hf)
    dense, count = hf.get("first_k_dense_replace", 0), hf["num_hidden_layers"]
    steps = [hf.get("prefix_dense_sliding_window_pattern", 1)] * dense
    steps += [hf.get("sliding_window_pattern", 4)] * (count - dense)
    places = [*range(dense), *range(count - dense)]
    kinds = hf.get("layer_types") or [
        SLIDING if (i + 1) % step else FULL for i, step in zip(places, steps, strict=True)
    ]
    listed = hf.get("mlp_layer_types") or ["dense"] * dense + ["sparse"] * (count - dense)
    sparse = tuple(int(kind == "sparse") for kind in listed)
    forced = hf.get("prefix_dense_sliding_window_pattern", 1) == 1
    plain = zip(kinds, sparse, strict=True)
    return {
        **read_logit_scale(hf),
        **read_rope({**hf, "rope_scaling": None}),  # a key that transformers does not read here
        "layer_types": tuple(kinds),
        "no_rope_freq": tuple(int(kind == FULL and (yes or not forced)) for kind, yes in plain),
        "moe_layer_freq": sparse,
        "moe_router_score_function": score,
        "moe_router_normalised": bool(normalised),
        **_shared(hf),
        **_norms(hf),
        "ffn_hidden_size": hf.get("prefix_dense_intermediate_size") or hf["intermediate_size"],
    }


def _moe_write(values: Values) -> HfConfig:
    kinds = {**write_layer_types(values), **write_moe_layers(values)}
    dense = {"prefix_dense_intermediate_size": values["ffn_hidden_size"]}
    score = {"expert_selection_fn": values["moe_router_score_function"]}
    parallel = {
        "norm_topk_prob": values["moe_router_normalised"],
        **write_shared_experts(values, "num_shared_experts"),
        "shared_expert_combination_strategy": "average" if values["moe_shared_expert_mean"] else "sum",
    }
    eps, root = values["layernorm_epsilon"], values["normalization"] == "RMSNorm"
    norms = {"rms_norm_eps": eps if root else None} | ({} if root else {"layer_norm_eps": eps})
    return {"logit_scale": 1 / values["logits_scaling"], **kinds, **dense, **score, **parallel, **norms}


def _shared(hf: HfConfig) -> JsonObject:
    count, strategy = hf.get("num_shared_experts", 0), hf.get("shared_expert_combination_strategy", "average")
    if count and strategy not in ("average", "sum"):
        raise HfConfigError(
            f"config.json: 'shared_expert_combination_strategy' is {strategy!r:.80}; supported: 'average', 'sum'"
        )
    return {
        "moe_shared_expert_intermediate_size": count * hf["intermediate_size"] or None,
        "moe_shared_expert_mean": bool(count) and strategy == "average",
    }


def _norms(hf: HfConfig) -> JsonObject:
    eps = hf.get("rms_norm_eps")
    if eps is None:
        return {"layernorm_epsilon": hf.get("layer_norm_eps", 1e-5)}
    return {"layernorm_epsilon": eps, "normalization": "RMSNorm"}


_DERIVED = ("ffn_hidden_size", "layernorm_epsilon")
COHERE2_MOE = replace(
    COHERE2,
    model_type="cohere2_moe",
    architecture="Cohere2MoeForCausalLM",
    config=replace(
        COHERE2.table,
        fields=(
            *(field for field in COHERE2.table.fields if field.mca not in _DERIVED),
            *expert_fields(count="num_experts", default=8, ffn="intermediate_size"),
        ),
        defaults={**COHERE2.table.defaults, "num_experts_per_tok": 2, "head_dim": 128},
        facts=(Lens(_moe_derive, _moe_write),),
    ),
    params=partial(moe_params, names=NAMES),
    moe=NAMES,
)


# Command A Vision and Aya Vision: HF `Cohere2VisionForConditionalGeneration`, `AyaVisionForConditionalGeneration`.
# A SigLIP tower, a gated MLP on merged patches, and a Cohere 2 text model.
def text_family() -> Family:
    """Return Cohere 2 without the scale of its logits, which transformers' classes with images do not apply."""
    text = COHERE2
    facts = tuple(fact for fact in text.table.facts if fact is not LOGIT_SCALE)
    return replace(text, config=replace(text.table, facts=facts))


def tensors(config: McaModelConfig, default: int | None = None, *, normed: bool = False) -> Shapes:
    """Return every tensor of tower and projector.

    Args:
        config: Model configuration.
        default: ``alignment_intermediate_size`` that files leave out; None: the hidden size.
        normed: A LayerNorm is in front of the projector.
    """
    about, vision = vision_values(config)
    merged = vision.size("hidden_size", 768) * about.size("downsample_factor", 2) ** 2
    between = about.size("alignment_intermediate_size", default or config.hidden_size)
    return {
        **{TOWER + name: shape for name, shape in siglip_tower(vision).items()},
        **(norm(f"{PROJECTOR}layernorm", merged) if normed else {}),
        **linear(f"{PROJECTOR}linear_1", between, merged),
        **linear(f"{PROJECTOR}linear_2", config.hidden_size, between // 2),
    }


COHERE2_VISION = vision_language_family(
    "cohere2_vision",
    "Cohere2VisionForConditionalGeneration",
    {"cohere2": text_family()},
    VisionModel(
        tensors=partial(tensors, default=36864),
        spellings=CLIP_SPELLINGS,
        projector=(PROJECTOR,),
        unused=lambda config: (f"{TOWER}head.",),
        image_tokens="tile_breaks",
        tokens_per_image=shuffled_tokens,
    ),
    NestedTextConfig(tied=True, defaults={"image_token_id": 255036}),
)
AYA_VISION = vision_language_family(
    "aya_vision",
    "AyaVisionForConditionalGeneration",
    {"cohere2": text_family()},
    VisionModel(
        tensors=partial(tensors, normed=True),
        spellings=CLIP_SPELLINGS,
        projector=(PROJECTOR,),
        unused=partial(unused_states, default=-1),
        image_tokens="named_tiles",
        tokens_per_image=shuffled_tokens,
    ),
    NestedTextConfig(tied=True, defaults={"image_token_index": 255036}),
)

FAMILIES = by_type(COHERE, COHERE2, COHERE2_MOE, COHERE2_VISION, AYA_VISION)
