"""Mistral 1 to 4, Ministral and Mixtral; Pixtral's tower, which LightOnOCR has too."""

from dataclasses import replace
from functools import partial

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates import get_family
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    ORIGINAL,
    SILU,
    ConfigTable,
    Field,
    Fixed,
    HfConfig,
    Lens,
    dense_fields,
    read_rope,
)
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts.common import dense_layers
from mca_models.templates.parts.mla import INTERLEAVED, MLA
from mca_models.templates.parts.moe import AUX_LOSS, NO_JITTER, expert_fields, moe_params
from mca_models.templates.parts.names import BLOCK_SPARSE
from mca_models.templates.parts.sliding_window import LISTED_WINDOWS
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    PROJECTOR,
    TOWER,
    NestedTextConfig,
    Shapes,
    VisionModel,
    gated_mlp,
    linear,
    llava_spelling,
    module_spelling,
    norm,
    repeat_shapes,
)
from mca_models.templates.parts.vision_values import vision_values

DEEPSEEK_V3 = get_family("deepseek_v3")

_HEAT = {"beta": "llama_4_scaling_beta", "length": ORIGINAL}


def derive_query_temperature(hf: HfConfig, default: JsonObject) -> JsonObject:
    """The rope, and how queries grow; ``default`` are its parameters where ``config.json`` names none."""
    own = {**default, "max_position_embeddings": hf["max_position_embeddings"]}
    said = hf.get("rope_scaling") or hf.get("rope_parameters") or own
    rope = read_rope({**hf, "rope_parameters": said})
    said = {**said, **(rope["rope_scaling"] or {})}
    if missing := [key for key in _HEAT.values() if said.get(key) is None]:
        raise HfConfigError(f"config.json: 'rope_parameters' has no {missing[0]}; this family needs it")
    heat = {name: said[key] for name, key in _HEAT.items()}
    return {**rope, "attn_temperature": {**heat, "first": 0}}


def write_query_temperature(values: Values) -> HfConfig:
    """Write the HF keys."""
    scaling = {"rope_theta": values["rotary_base"], "rope_type": "default", **(values["rope_scaling"] or {})}
    heat = values["attn_temperature"] or {}
    return {"rope_parameters": {**scaling, **{key: heat[name] for name, key in _HEAT.items()}}}


YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0},
    "llama_4_scaling_beta": 0.1,
}
"""Default of transformers where ``config.json`` has no rope."""


# Mistral 7B and its successors: HF `MistralForCausalLM`: Llama's weights with a sliding window.
MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    config=ConfigTable(
        fields=(*dense_fields(), Field("window_size", "sliding_window", None)),
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        fixed=(SILU,),
    ),
    params=dense_layers,
)

# Ministral 8B: HF `MinistralForCausalLM`: Mistral's weights with a window in the layers that are named.
MINISTRAL = replace(
    MISTRAL,
    model_type="ministral",
    architecture="MinistralForCausalLM",
    config=replace(MISTRAL.table, facts=(LISTED_WINDOWS,)),
)

# Ministral 3: HF `Ministral3ForCausalLM`: Mistral, queries beyond the first context grow with their position.
MINISTRAL3 = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    config=ConfigTable(
        fields=(*dense_fields(eps=1e-5), Field("window_size", "sliding_window", None)),
        defaults={"num_key_value_heads": 8, "head_dim": 128, "pad_token_id": 11},
        fixed=(SILU,),
        facts=(Lens(lambda hf: derive_query_temperature(hf, YARN), write_query_temperature),),
    ),
    params=dense_layers,
)


# Mixtral: HF `MixtralForCausalLM`, every MLP a mixture of experts.
MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    config=ConfigTable(
        fields=(
            *dense_fields(),
            *expert_fields(count="num_local_experts", default=8, ffn="intermediate_size"),
            Field("window_size", "sliding_window", None),
        ),
        defaults={"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
        fixed=(SILU, NO_JITTER),
        aliases={"num_experts": "num_local_experts"},
        facts=(AUX_LOSS,),
    ),
    params=partial(moe_params, names=BLOCK_SPARSE),
    moe=BLOCK_SPARSE,
)


# Mistral 4: HF `Mistral4ForCausalLM`: MLA, softmax routing, query temperature that grows with the position.
ROPE = {**YARN, **{"rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192}}
"""Default of transformers where ``config.json`` has no rope."""
MISTRAL4 = replace(
    DEEPSEEK_V3,
    model_type="mistral4",
    architecture="Mistral4ForCausalLM",
    config=replace(
        DEEPSEEK_V3.table,
        defaults={"q_lora_rank": 1024, "n_shared_experts": 1, "n_routed_experts": 128, "pad_token_id": 11},
        constants={"qk_layernorm": True},
        fixed=(
            *(SILU, NO_ATTENTION_BIAS, INTERLEAVED),
            Fixed("norm_topk_prob", (True,), "the softmax is over the chosen experts"),
            Fixed(
                "n_group",
                (1, None),
                "groups are chosen by their two best experts, whose chances Megatron has not",
            ),
            Fixed("topk_group", (1, None), "there is one group of experts to choose from"),
        ),
        aliases={"num_local_experts": "n_routed_experts"},
        facts=(
            MLA,
            Lens(
                lambda hf: {**derive_query_temperature(hf, ROPE), "rotary_percent": 1.0},
                write_query_temperature,
            ),
        ),
    ),
)

_norm, _linear = partial(norm, bias=False), partial(linear, bias=False)


def pixtral_tensors(config: McaModelConfig, *, tower: str, projector: str) -> Shapes:
    """Return every tensor of tower and projector.

    Args:
        config: The model.
        tower: Beginning of the names of the tower.
        projector: Beginning of the names of the projector.
    """
    about, vision = vision_values(config)
    width, inner = vision.size("hidden_size", 1024), vision.size("intermediate_size", 4096)
    size, merge = vision.size("patch_size", 16), about.size("spatial_merge_size", 2)
    layer = {
        **_norm("attention_norm", width),
        **_norm("ffn_norm", width),
        **_linear("attention.q_proj", width, width),
        **_linear("attention.k_proj", width, width),
        **_linear("attention.v_proj", width, width),
        **_linear("attention.o_proj", width, width),
        **gated_mlp("feed_forward.", inner, width, bias=False),
    }
    biased = about.flag("multimodal_projector_bias", False)
    taken = width * len(about.index_or_more("vision_feature_layer", -1))
    return {
        f"{tower}patch_conv.weight": (width, vision.size("num_channels", 3), size, size),
        **_norm(f"{tower}ln_pre", width),
        **repeat_shapes(f"{tower}transformer.layers", vision.layers("num_hidden_layers", 24), layer),
        **_norm(f"{projector}norm", width),
        **_linear(f"{projector}patch_merger.merging_layer", width, width * merge**2),
        **linear(f"{projector}linear_1", config.hidden_size, taken, bias=biased),
        **linear(f"{projector}linear_2", config.hidden_size, config.hidden_size, bias=biased),
    }


def tokens_of_size(config: McaModelConfig, height: int, width: int) -> int:
    """Return the features of an image of ``height`` times ``width`` pixels."""
    about, vision = vision_values(config)
    side = vision.size("patch_size", 16) * about.size("spatial_merge_size", 2)
    return int(height // side) * int(width // side)


# Mistral Small 3.1 to 4, Ministral 3: HF `Mistral3ForConditionalGeneration`: a Pixtral tower and a text model.
MISTRAL3 = vision_language_family(
    "mistral3",
    "Mistral3ForConditionalGeneration",
    {"mistral": MISTRAL, "ministral3": MINISTRAL3, "mistral4": MISTRAL4},
    VisionModel(
        tensors=partial(pixtral_tensors, tower=TOWER, projector=PROJECTOR),
        spellings=(llava_spelling(TOWER, PROJECTOR), module_spelling(TOWER, PROJECTOR)),
        projector=(PROJECTOR,),
        image_tokens="lines",
        tokens_of_size=tokens_of_size,
    ),
    NestedTextConfig(tied=True),
    assumed=True,
)


# LightOnOCR: HF `LightOnOcrForConditionalGeneration`: a Pixtral tower and Qwen 3.
_TOWER, _PROJECTOR = "vision_encoder.", "vision_projection."
LIGHTON_OCR = vision_language_family(
    "lighton_ocr",
    "LightOnOcrForConditionalGeneration",
    {"qwen3": get_family("qwen3")},
    VisionModel(
        tensors=partial(pixtral_tensors, tower=_TOWER, projector=_PROJECTOR),
        spellings=(module_spelling(_TOWER, _PROJECTOR),),
        projector=(_PROJECTOR,),
        image_tokens="whole_lines",
        tokens_of_size=tokens_of_size,
    ),
    NestedTextConfig(tied=True, defaults={"image_token_id": 151655}),
)

FAMILIES = by_type(MISTRAL, MINISTRAL, MINISTRAL3, MIXTRAL, MISTRAL4, MISTRAL3, LIGHTON_OCR)
