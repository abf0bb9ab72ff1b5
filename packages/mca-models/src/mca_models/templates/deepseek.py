"""DeepSeek V2 to V3.2, and others' models of its layers."""

from collections.abc import Collection
from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates import get_family
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    NO_MLP_BIAS,
    SILU,
    ConfigTable,
    Field,
    Fixed,
    HfConfig,
    Lens,
    dense_fields,
)
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts.clip_tower import siglip_tower
from mca_models.templates.parts.common import inner
from mca_models.templates.parts.mla import (
    INTERLEAVED,
    LATENT_FIELDS,
    MLA,
    MLA_FIELDS,
    SIGMOID_MLA,
    key_channels,
    latent_attention,
    mla_dense_params,
    mla_moe_params,
)
from mca_models.templates.parts.moe import (
    MOE_LAYERS,
    NORMALISED,
    SIGMOID_ROUTER,
    listed_moe_layers,
    moe_params,
)
from mca_models.templates.parts.mtp import mtp_copies
from mca_models.templates.parts.names import HF, MoeNames
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    NestedTextConfig,
    Shapes,
    Spelling,
    VisionModel,
    linear,
    module_spelling,
)
from mca_models.templates.parts.vision_values import vision_values
from mca_models.weights import Param

# DeepSeek V2: HF `DeepseekV2ForCausalLM`: MLA, experts chosen by softmax.
GREEDY, LIMITED = "greedy", "group_limited_greedy"


def read_groups(hf: HfConfig) -> JsonObject:
    """Groups count only if named, and by their best expert."""
    if hf["topk_method"] == GREEDY:
        return {"moe_router_num_groups": None, "moe_router_group_topk": None}
    return {"moe_router_group_score": "max"}


def write_groups(values: Values) -> HfConfig:
    """Write the routing method."""
    return {"topk_method": LIMITED if values["moe_router_num_groups"] else GREEDY}


DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    config=ConfigTable(
        fields=MLA_FIELDS,
        defaults={"topk_method": GREEDY, "n_routed_experts": 64, "n_shared_experts": 2, "q_lora_rank": 1536},
        constants={"qk_layernorm": True, "moe_router_pre_softmax": True},
        fixed=(
            SILU,
            NO_ATTENTION_BIAS,
            NO_MLP_BIAS,
            Fixed("topk_method", (GREEDY, LIMITED), "DeepSeek V2's router"),
            Fixed("scoring_func", ("softmax",), "DeepSeek V2's router"),
            Fixed("norm_topk_prob", (False,), "transformers ignores it, other programs do not"),
            Fixed("moe_layer_freq", (1,), "every layer after the first dense ones has experts"),
        ),
        aliases={"num_experts": "n_routed_experts"},
        facts=(MLA, Lens(read_groups, write_groups)),
    ),
    params=mla_moe_params,
    moe=MoeNames(),
)


# DeepSeek V3 and R1: HF `DeepseekV3ForCausalLM`: MLA, experts, multi-token prediction. Kimi K2 has other sizes.
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    config=ConfigTable(
        fields=MLA_FIELDS,
        defaults={
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 1,
            "q_lora_rank": 1536,
            "num_nextn_predict_layers": 1,
        },
        constants={"qk_layernorm": True, **SIGMOID_ROUTER},
        fixed=(
            SILU,
            NO_ATTENTION_BIAS,
            NORMALISED,
            Fixed("scoring_func", ("sigmoid",), "DeepSeek V3's router"),
            Fixed("topk_method", ("noaux_tc",), "DeepSeek V3's router"),
            Fixed("moe_layer_freq", (1,), "every layer after the first dense ones has experts"),
            INTERLEAVED,
        ),
        aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
        facts=(SIGMOID_MLA,),
    ),
    params=mla_moe_params,
    moe=MoeNames(),
    copies=mtp_copies,
)
KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2", in_transformers=False)


# DeepSeek V3.2: HF `DeepseekV32ForCausalLM`: DeepSeek V3 with DSA (lightning indexer).
INDEX_FIELDS = (
    Field("index_topk", "index_topk", 2048),
    Field("index_num_heads", "index_n_heads", 64),
    Field("index_head_dim", "index_head_dim", 128),
)
_V32_NAMES = {
    **{"wq_b": "wq_b.weight", "wk": "wk.weight", "weights_proj": "weights_proj.weight"},
    **{"k_norm_weight": "k_norm.weight", "k_norm_bias": "k_norm.bias"},
}


def _v32_params(config: McaModelConfig) -> list[Param]:
    mca, hf = "self_attention.core_attention.indexer.", "self_attn.indexer."
    indexer = [inner(mca + own, hf + its) for own, its in _V32_NAMES.items()]
    return moe_params(config, MoeNames(), [*latent_attention(config), *indexer])


DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    config=replace(
        DEEPSEEK_V3.table,
        fields=(*MLA_FIELDS, *INDEX_FIELDS),
        fixed=tuple(fixed for fixed in DEEPSEEK_V3.table.fixed if fixed is not INTERLEAVED),
        aliases=dict.fromkeys(("num_local_experts", "num_experts"), "n_routed_experts"),
        facts=(SIGMOID_MLA, MOE_LAYERS),
    ),
    params=_v32_params,
)


# A.X K1: HF `AXK1ForCausalLM`: DeepSeek V3's layers, with a norm after MoE layers.
# Published files have no expert biases, which transformers then sets to 0, and hold the norm in dense layers too, where
# nothing reads it.
_AXK1_NAMES = MoeNames(in_memory=(("post_mlp_layernorm", "mlp.post_mlp_layernorm"),))


def _axk1_params(config: McaModelConfig) -> list[Param]:
    return moe_params(config, _AXK1_NAMES, latent_attention(config))


def unused_norms(config: McaModelConfig) -> frozenset[str]:
    """Return the names of the norms after dense layers."""
    dense = (layer for layer in range(config.num_layers) if not config.is_moe_layer(layer))
    return frozenset(HF.format(layer=layer) + _AXK1_NAMES.post_norm for layer in dense)


def detect_biases(config: McaModelConfig, names: Collection[str]) -> Values:
    """Return no expert biases if no tensor has them."""
    if any(name.endswith("e_score_correction_bias") for name in names):
        return {}
    return {"moe_router_enable_expert_bias": False}


AXK1 = replace(
    DEEPSEEK_V3,
    model_type="axk1",
    architecture="AXK1ForCausalLM",
    config=replace(
        DEEPSEEK_V3.table,
        defaults={
            **{"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
            **{"n_shared_experts": 1, "q_lora_rank": 1536, "n_routed_experts": 192},
        },
        constants={**DEEPSEEK_V3.table.constants, "moe_post_norm": True},
        aliases={"num_local_experts": "n_routed_experts"},
        facts=(SIGMOID_MLA, listed_moe_layers(1)),
    ),
    params=_axk1_params,
    moe=_AXK1_NAMES,
    ignored_hf=unused_norms,
    detect_fields=detect_biases,
)


# Youtu-LLM: HF `YoutuForCausalLM`: DeepSeek's MLA, no experts.
DERIVED = ("kv_channels", "init_method_std")
YOUTU = Family(
    model_type="youtu",
    architecture="YoutuForCausalLM",
    config=ConfigTable(
        fields=(
            *(field for field in dense_fields(tied=True) if field.mca not in DERIVED),
            *LATENT_FIELDS,
            Field("init_method_std", "initializer_range", lambda hf: 2 / (5 * hf["hidden_size"]) ** 0.5),
        ),
        defaults={"q_lora_rank": 1536},
        constants={"qk_layernorm": True},
        fixed=(SILU, NO_ATTENTION_BIAS, INTERLEAVED),
        facts=(Lens(key_channels),),
    ),
    params=mla_dense_params,
)


# DeepSeek VL: HF `DeepseekVLForConditionalGeneration`: a SigLIP tower, an aligner, and Llama.
_TOWER, _ALIGNER = "vision_model.", "aligner."
_PUBLISHED = Spelling(  # by transformers 4
    "model.language_model.",
    "lm_head.",
    {_TOWER: f"model.{_TOWER}vision_model.", _ALIGNER: f"model.{_ALIGNER}"},
)


def tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of tower and aligner."""
    _, vision = vision_values(config)
    return {
        **{_TOWER + name: shape for name, shape in siglip_tower(vision).items()},
        **linear(f"{_ALIGNER}linear1", config.hidden_size, vision.size("hidden_size", 768)),
        **linear(f"{_ALIGNER}linear2", config.hidden_size, config.hidden_size),
    }


def tokens_per_image(config: McaModelConfig) -> int:
    """Return the patches of an image."""
    _, vision = vision_values(config)
    return int(vision.size("image_size", 224) // vision.size("patch_size", 16)) ** 2


DEEPSEEK_VL = vision_language_family(
    "deepseek_vl",
    "DeepseekVLForConditionalGeneration",
    {"llama": get_family("llama")},
    VisionModel(
        tensors=tensors,
        spellings=(_PUBLISHED, module_spelling(_TOWER, _ALIGNER)),
        projector=(_ALIGNER,),
        unused=lambda config: (f"{_TOWER}head.",),
        image_tokens="plain",
        tokens_per_image=tokens_per_image,
    ),
    NestedTextConfig(tied=True, defaults={"image_token_id": 100015}),
    assumed=True,
)

FAMILIES = by_type(DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2, DEEPSEEK_V32, AXK1, YOUTU, DEEPSEEK_VL)
