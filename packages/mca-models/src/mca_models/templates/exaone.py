"""EXAONE 3, 4 and 4.5, and K-EXAONE."""

from dataclasses import replace
from functools import partial

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import (
    SILU,
    SWIGLU_WITHOUT_BIASES,
    ConfigTable,
    HfConfig,
    Lens,
    dense_fields,
)
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts.common import dense_layers, renamed
from mca_models.templates.parts.moe import (
    NORMALISED,
    SCALED,
    SIGMOID_ROUTER,
    derive_moe_layers,
    expert_fields,
    moe_params,
    sigmoid_experts,
    write_groups,
)
from mca_models.templates.parts.names import MoeNames
from mca_models.templates.parts.passthrough import with_mtp_passthrough
from mca_models.templates.parts.qwen_tower import MERGERS, VISUAL, gated_tower, gated_width
from mca_models.templates.parts.sliding_window import (
    ROTATED_WINDOWS,
    derive_rotated_windows,
    write_rotated_windows,
)
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import NestedTextConfig, Shapes, VisionModel, module_spelling
from mca_models.templates.parts.vision_values import vision_values
from mca_models.weights import Param

# EXAONE 3: HF `LlamaForCausalLM` of type `exaone`: Llama under other names in files.
MODULES = "module_names"
FILES = {
    **{".self_attn.o_proj": ".attn.attention.out_proj", ".self_attn.": ".attn.attention."},
    **{".input_layernorm": ".ln_1", ".post_attention_layernorm": ".ln_2"},
    **{".mlp.gate_proj": ".mlp.c_fc_0", ".mlp.up_proj": ".mlp.c_fc_1", ".mlp.down_proj": ".mlp.c_proj"},
}
OUTER_FILES = {
    "model.embed_tokens": "transformer.wte",
    "model.layers": "transformer.h",
    "model.norm": "transformer.ln_f",
}


def llama_params(config: McaModelConfig) -> list[Param]:
    """Every parameter of EXAONE 3, in checkpoint order."""
    rules = dense_layers(config)
    return rules if config.extra.get(MODULES) else renamed(renamed(rules, FILES), OUTER_FILES)


EXAONE = Family(
    model_type="exaone",
    architecture="LlamaForCausalLM",
    config=ConfigTable(
        fields=dense_fields(eps=1e-5),
        defaults={"num_key_value_heads": 8, "rope_theta": 5e5, "pad_token_id": 0},
        fixed=SWIGLU_WITHOUT_BIASES,
        aliases={
            **{"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps"},
            "activation_function": "hidden_act",
        },
    ),
    params=llama_params,
    module_names={MODULES: True},
)


# EXAONE 4: HF `Exaone4ForCausalLM`: post-norms; RoPE only in sliding-window layers.
EXAONE4 = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    config=ConfigTable(
        fields=dense_fields(eps=1e-5),
        defaults={"num_key_value_heads": 32, "sliding_window": 4096},
        constants={"norm_placement": "post", "qk_layernorm": True},
        fixed=(SILU,),
        facts=(ROTATED_WINDOWS,),
    ),
    params=dense_layers,
)


# K-EXAONE: HF `ExaoneMoeForCausalLM`: EXAONE 4's attention after norms, DeepSeek V3's experts.
BIAS = "mlp.e_score_correction_bias"
NAMES = MoeNames(router_bias=BIAS, in_memory=((BIAS, "mlp.gate.e_score_correction_bias"),))


def derive(hf: HfConfig) -> JsonObject:
    """Windows and ropes by layer, and experts."""
    experts = sigmoid_experts({**hf, "n_shared_experts": hf.get("num_shared_experts", 1)})
    return {**derive_rotated_windows(hf), **experts, **derive_moe_layers(hf), "mtp_num_layers": 0}


def _write(values: Values) -> HfConfig:
    groups = write_groups(values)
    return {**write_rotated_windows(values), **groups, "num_shared_experts": groups["n_shared_experts"]}


EXAONE_MOE = with_mtp_passthrough(
    Family(
        model_type="exaone_moe",
        architecture="ExaoneMoeForCausalLM",
        config=ConfigTable(
            fields=(*dense_fields(eps=1e-5), *expert_fields(count="num_experts", default=64), SCALED),
            defaults={
                "num_key_value_heads": 32,
                "sliding_window": 4096,
                "first_k_dense_replace": 1,
                "routed_scaling_factor": 2.5,
                "pad_token_id": 0,
            },
            constants={"qk_layernorm": True, **SIGMOID_ROUTER},
            fixed=(SILU, NORMALISED),
            facts=(Lens(derive, _write),),
        ),
        params=partial(moe_params, names=NAMES),
        moe=NAMES,
    )
)


# EXAONE 4.5: HF `Exaone4_5_ForConditionalGeneration`: the tower of Qwen 2.5 VL with fewer keys, and EXAONE 4.
def _tensors(config: McaModelConfig) -> Shapes:
    _, vision = vision_values(config)
    width = gated_width(vision)
    heads, groups = vision.size("num_heads", 16), vision.size("num_key_value_heads", 8)
    return gated_tower(vision, {"qkv": width + 2 * groups * (width // heads)})


EXAONE4_5 = vision_language_family(
    "exaone4_5",
    "Exaone4_5_ForConditionalGeneration",
    {"exaone4": EXAONE4, "exaone4_5_text": replace(EXAONE4, model_type="exaone4_5_text")},
    VisionModel(
        tensors=_tensors, spellings=(module_spelling(VISUAL),), projector=MERGERS, video_tokens="together"
    ),
    NestedTextConfig(defaults={"image_token_id": 67, "video_token_id": 68}),
    assumed=True,
)

FAMILIES = by_type(EXAONE, EXAONE4, EXAONE_MOE, EXAONE4_5)
