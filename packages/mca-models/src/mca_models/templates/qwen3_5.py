"""Qwen 3 Next and 3.5: gated delta net and attention."""

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import Typed
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    SILU,
    ConfigTable,
    Field,
    HfConfig,
    dense_fields,
)
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts import gated_delta_net as delta
from mca_models.templates.parts.common import attention, dense_mlp, embedding, head
from mca_models.templates.parts.gated_delta_net import PREFIX_KEY, detect_prefix, in_proj, prefixed
from mca_models.templates.parts.moe import (
    AUX_LOSS,
    SHARED_WIDTH,
    SPARSE_LAYERS,
    expert_fields,
    last_layer,
    mlp_layers,
)
from mca_models.templates.parts.mtp import OWN_EMBEDDING, mtp_params
from mca_models.templates.parts.names import HF, MoeNames
from mca_models.templates.parts.qwen_tower import DEEPSTACK
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import NestedTextConfig
from mca_models.weights import Concat, GroupedHeads, Param, PerTensor, expand_rules

# Qwen 3 Next: HF `Qwen3NextForCausalLM`: gated delta net, gated attention, experts.
_NEXT_NAMES = MoeNames(shared="mlp.shared_expert.")


def _grouped_in_proj(config: McaModelConfig) -> Param:
    """The input projection, which HF groups by key head: ``[q k v..v z..z]`` and ``[b..b a..a]``."""
    q, k, v, z, b, a = (
        rows // (given(config.linear_attention).linear_num_key_heads or 1) for rows in delta.segments(config)
    )
    return Param(
        mca="",
        hf=(f"{HF}linear_attn.in_proj_qkvz.weight", f"{HF}linear_attn.in_proj_ba.weight"),
        hf_layout=PerTensor(((GroupedHeads((q, k, v, z), 1), 4), (GroupedHeads((b, a), 1), 2))),
        layout=Concat(delta.segments(config)),
    )


def _next_params(config: McaModelConfig) -> list[Param]:
    inside = last_layer(config, _NEXT_NAMES, attention(config))
    mtp = mtp_params(config, inside, delta.MTP_NAMES, delta.MTP_PREFIX)
    layers = delta.mixed_attention(config, _grouped_in_proj(config))
    return [embedding(), *layers, *mlp_layers(config, _NEXT_NAMES), *mtp, *head(config)]


QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    config=ConfigTable(
        fields=(
            *dense_fields(),
            *expert_fields(count="num_experts", default=512),
            SHARED_WIDTH,
            *delta.FIELDS,
        ),
        defaults={**delta.DEFAULTS, "num_key_value_heads": 2, "norm_topk_prob": True},
        constants={**delta.CONSTANTS, "moe_shared_expert_gate": True},
        fixed=(SILU, NO_ATTENTION_BIAS),
        facts=(SPARSE_LAYERS, delta.MIXED_LAYERS),
        partial_rotary=True,
    ),
    params=_next_params,
    moe=_NEXT_NAMES,
    count_mtp=delta.detect_mtp_layers,
)


# Qwen 3.5, the text models: HF `Qwen3_5ForCausalLM` and `Qwen3_5MoeForCausalLM`: gated delta net and attention.
def _text_params(config: McaModelConfig) -> list[Param]:
    inside = [*attention(config), *dense_mlp(config)]
    mtp = mtp_params(config, inside, delta.MTP_NAMES, delta.MTP_PREFIX)
    layers = delta.mixed_attention(config, in_proj(config))
    mlp = expand_rules(dense_mlp(config), layers=range(config.num_layers))
    return prefixed(config, [embedding(), *layers, *mlp, *mtp, *head(config)])


QWEN3_5_TEXT = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    config=ConfigTable(
        fields=(*dense_fields(), *delta.FIELDS),
        defaults={**delta.DEFAULTS, "num_key_value_heads": 4},
        constants=delta.CONSTANTS,
        fixed=(SILU, NO_ATTENTION_BIAS, OWN_EMBEDDING),
        facts=(delta.MIXED_LAYERS,),
        partial_rotary=True,
    ),
    params=_text_params,
    detect_extra=detect_prefix,
    count_mtp=delta.detect_mtp_layers,
    module_names={PREFIX_KEY: ""},
)


def expert_width(hf: HfConfig) -> Typed:
    """No layer has a dense MLP, so its width is of no consequence."""
    return hf["moe_intermediate_size"]


_TEXT_NAMES = MoeNames(shared="mlp.shared_expert.")
SIZES = tuple(field for field in dense_fields() if field.mca != "ffn_hidden_size")
MOE_CONFIG = ConfigTable(
    fields=(
        *SIZES,
        Field("ffn_hidden_size", "intermediate_size", expert_width),
        *expert_fields(count="num_experts", default=256),
        SHARED_WIDTH,
        *delta.FIELDS,
    ),
    defaults={**delta.DEFAULTS, "num_key_value_heads": 2, "moe_intermediate_size": 512},
    constants={**delta.CONSTANTS, "moe_shared_expert_gate": True},
    fixed=(SILU, NO_ATTENTION_BIAS, OWN_EMBEDDING),
    facts=(delta.MIXED_LAYERS, AUX_LOSS),
    partial_rotary=True,
)


def _moe_params(config: McaModelConfig) -> list[Param]:
    inside = last_layer(config, _TEXT_NAMES, attention(config))
    mtp = mtp_params(config, inside, delta.MTP_NAMES, delta.MTP_PREFIX)
    layers = delta.mixed_attention(config, in_proj(config))
    return prefixed(config, [embedding(), *layers, *mlp_layers(config, _TEXT_NAMES), *mtp, *head(config)])


QWEN3_5_MOE_TEXT = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    config=MOE_CONFIG,
    params=_moe_params,
    moe=_TEXT_NAMES,
    detect_extra=detect_prefix,
    count_mtp=delta.detect_mtp_layers,
    module_names={PREFIX_KEY: ""},
)


# Qwen 3.5 and 3.5 with experts: HF `Qwen3_5ForConditionalGeneration` and `Qwen3_5MoeForConditionalGeneration`.
# The vision model is that of Qwen 3 VL, without inner layers that give features.
def _family(model_type: str, architecture: str, text: Family) -> Family:
    return vision_language_family(
        model_type,
        architecture,
        {text.model_type: text},
        DEEPSTACK,
        NestedTextConfig(rope=((11, 11, 10), True)),
    )


QWEN3_5 = _family("qwen3_5", "Qwen3_5ForConditionalGeneration", QWEN3_5_TEXT)
QWEN3_5_MOE = _family("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", QWEN3_5_MOE_TEXT)

FAMILIES = by_type(QWEN3_NEXT, QWEN3_5_TEXT, QWEN3_5_MOE_TEXT, QWEN3_5, QWEN3_5_MOE)
