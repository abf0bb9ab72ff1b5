"""LongCat Flash: HF ``LongcatFlashForCausalLM``: layers of two attentions and two MLPs, past half of them the experts.

A HF layer is two of Megatron's: the first has the experts, and its MLP as their shared expert.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig, require_ranges
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
)
from mca_models.templates.family import Family
from mca_models.templates.parts.common import dense_mlp, embedding, head, renamed
from mca_models.templates.parts.mla import LATENT_FIELDS, latent_attention
from mca_models.templates.parts.moe import SCALED, experts, router, shared_experts
from mca_models.templates.parts.names import HF, MoeNames
from mca_models.templates.parts.passthrough import with_mtp_passthrough
from mca_models.weights import Param

NAMES = MoeNames(
    router="mlp.router.classifier.weight", router_bias="mlp.router.e_score_correction_bias", shared="mlps.0."
)
IN_HALVES = ("self_attn.", "input_layernorm.", "post_attention_layernorm.")
"""Modules of which a HF layer has two, in addition to MLPs."""
DERIVED = ("num_layers", "ffn_hidden_size", "kv_channels")
SCALED_LATENT = "the factors on queries and on compressed keys and values"


def derive(hf: HfConfig) -> JsonObject:
    """Derive pairs of layers, the MLP parallel to the experts, and factors in MLA."""
    count = hf.get("num_layers") or hf.get("num_hidden_layers", 56) // 2
    require_ranges({"num_layers": count})  # before a list is made that is as long
    return {
        **{"num_layers": 2 * count, "moe_layer_freq": (1, 0) * count},
        "kv_channels": hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"],
        "moe_shared_expert_intermediate_size": hf["ffn_hidden_size"],
        "query_multiplier": (hf["hidden_size"] / hf["q_lora_rank"]) ** 0.5,
        "latent_multiplier": (hf["hidden_size"] / hf["kv_lora_rank"]) ** 0.5,
    }


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {"num_layers": values["num_layers"] // 2}


CONFIG = ConfigTable(
    fields=(
        *(field for field in dense_fields(eps=1e-5) if field.mca not in DERIVED),
        *LATENT_FIELDS,
        SCALED,
        Field("ffn_hidden_size", "ffn_hidden_size"),
        Field("num_moe_experts", "n_routed_experts"),
        Field("moe_identity_experts", "zero_expert_num"),
        Field("moe_ffn_hidden_size", "expert_ffn_hidden_size"),
        Field("moe_router_topk", "moe_topk"),
    ),
    defaults={
        **{"q_lora_rank": 1536, "kv_lora_rank": 512, "v_head_dim": 128, "ffn_hidden_size": 12288},
        **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "expert_ffn_hidden_size": 2048},
        **{"n_routed_experts": 512, "zero_expert_num": 256, "moe_topk": 12, "routed_scaling_factor": 6.0},
        "rope_theta": 1e7,
    },
    constants={
        **{"qk_layernorm": True, "moe_router_pre_softmax": True, "moe_router_enable_expert_bias": True},
        "moe_shortcut": True,
    },
    fixed=(
        SILU,
        NO_ATTENTION_BIAS,
        Fixed("mla_scale_q_lora", (True,), SCALED_LATENT),
        Fixed("mla_scale_kv_lora", (True,), SCALED_LATENT),
        Fixed("attention_method", ("MLA",), "MLA"),
        Fixed("zero_expert_type", ("identity",), "experts without weights give a token back"),
        Fixed("router_bias", (False,), "transformers leaves such a bias out"),
        Fixed("norm_topk_prob", (False,), "the weights of chosen experts are not normalized"),
    ),
    aliases={
        **{"num_local_experts": "n_routed_experts", "num_experts_per_tok": "moe_topk"},
        **{"intermediate_size": "ffn_hidden_size", "moe_intermediate_size": "expert_ffn_hidden_size"},
    },
    facts=(Lens(derive, write),),
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    attention = latent_attention(config)
    first = [*attention, *router(config, NAMES), *shared_experts(config, NAMES)]
    each_expert = range(config.num_experts)
    return [
        embedding(),
        *_half(config, _named(first, 0), 0),
        *_half(config, experts(config, NAMES), 0, each_expert),
        *_half(config, _named([*attention, *dense_mlp(config)], 1), 1),
        *head(config),
    ]


def _named(rules: Sequence[Param], half: int) -> list[Param]:
    names = {f".{name}": f".{name}{half}." for name in IN_HALVES}
    return renamed(rules, names if half == 0 else {**names, ".mlp.": f".mlps.{half}."})


def _half(
    config: McaModelConfig, rules: Sequence[Param], half: int, experts: Iterable[int | None] = (None,)
) -> Iterator[Param]:
    """``rules`` in every second layer from ``half`` on, for every expert."""
    for layer in range(half, config.num_layers, 2):
        for expert in experts:
            yield from (replace(rule, layer=layer, hf_layer=layer // 2, expert=expert) for rule in rules)


def ignored_hf(config: McaModelConfig) -> frozenset[str]:
    """Matrices that transformers saves for experts which do not compute with any."""
    first = config.num_experts
    return frozenset(
        f"{HF}{NAMES.experts}{expert}.{part}".format(layer=layer)
        for layer in range(config.num_layers // 2)
        for expert in range(first, first + given(config.moe).moe_identity_experts)
        for part in (NAMES.gate, NAMES.up)
    )


FAMILY = with_mtp_passthrough(
    Family(
        model_type="longcat_flash",
        architecture="LongcatFlashForCausalLM",
        config=CONFIG,
        params=params,
        moe=NAMES,
        ignored_hf=ignored_hf,
        unadaptable=frozenset({"classifier"}),
    )
)
