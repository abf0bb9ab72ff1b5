"""Ling 3: HF ``BailingHybridForCausalLM``: bounded Kimi Delta Attention, MLA with a gate for each head, experts."""

from mca_config.errors import HfConfigError
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
from mca_models.templates.family import Family
from mca_models.templates.parts.common import embedding, head, renamed
from mca_models.templates.parts.kimi_delta_attention import (
    delta_and_latent_attention,
    delta_sizes,
    write_delta_sizes,
)
from mca_models.templates.parts.mla import LATENT_FIELDS, key_channels
from mca_models.templates.parts.moe import (
    SCALED,
    derive_moe_layers,
    mlp_layers,
    sigmoid_experts,
    write_moe_layers,
    write_shared_experts,
)
from mca_models.templates.parts.names import MoeNames
from mca_models.templates.parts.passthrough import with_mtp_passthrough
from mca_models.weights import Param

KIMI = get_family("kimi_linear")
NAMES = MoeNames(
    router_bias="mlp.gate.expert_bias", in_memory=(("gate.expert_bias", "gate.e_score_correction_bias"),)
)
FILES = {
    ".self_attn.o_proj": ".attention.dense",
    ".self_attn.": ".attention.",
    "embed_tokens": "word_embeddings",
}
MODULES = "module_names"


def read(hf: HfConfig) -> JsonObject:
    """Derive the types of layers, the sizes of linear attention, its bound, and the experts."""
    count, step = hf["num_hidden_layers"], hf.get("layer_group_size", 6)
    kinds = ["linear_attention" if (i + 1) % step else "full_attention" for i in range(count)]
    groups = {"n_group": hf["num_expert_group"], "num_experts_per_tok": hf["num_experts_per_token"]}
    experts = {"n_shared_experts": hf["num_shared_experts"], "n_routed_experts": hf["num_experts"]}
    is_bounded, bound = hf.get("kda_safe_gate", True), hf.get("kda_lower_bound", -5.0)
    if is_bounded and (not isinstance(bound, (int, float)) or bound >= 0):
        raise HfConfigError(f"config.json: 'kda_lower_bound' is {bound}; expected a number below 0")
    return {
        **sigmoid_experts({**hf, **groups, **experts}),
        **derive_moe_layers(hf),
        **{
            "mtp_num_layers": 0,
            "linear_decay_bound": float(bound) if is_bounded else None,
            **key_channels(hf),
        },
        "layer_types": tuple(hf.get("layer_types") or kinds),
        **delta_sizes(
            hf.get("linear_num_heads", hf["num_attention_heads"]),
            hf.get("linear_head_dim", hf.get("head_dim", 128)),
            hf.get("linear_conv_kernel_dim", hf.get("short_conv_kernel_size", 4)),
        ),
    }


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    bound = values["linear_decay_bound"]
    return {
        **write_shared_experts(values, "num_shared_experts"),
        "num_expert_group": values["moe_router_num_groups"] or 1,
        "topk_group": values["moe_router_group_topk"] or 1,
        **{"kda_safe_gate": bound is not None, "kda_lower_bound": -5.0 if bound is None else bound},
        **{**write_delta_sizes(values), **write_moe_layers(values)},
    }


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    loaded = bool(config.extra.get("fused_experts") or config.extra.get(MODULES))
    rules = [embedding(), *delta_and_latent_attention(config, loaded=loaded)]
    rules = [*rules, *mlp_layers(config, NAMES), *head(config)]
    return rules if loaded else renamed(rules, FILES)


_OWN_KEYS = ("kv_channels", "max_position_embeddings")
_SIZES = {
    **{"num_expert_group": 8, "topk_group": 4, "num_shared_experts": 1, "num_experts_per_token": 8},
    **{"num_experts": 512, "moe_intermediate_size": 768, "routed_scaling_factor": 2.5},
    **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
    **{"num_key_value_heads": 32, "first_k_dense_replace": 2, "rope_theta": 6e6, "pad_token_id": 156892},
}
FAMILY = with_mtp_passthrough(
    Family(
        model_type="bailing_hybrid",
        architecture="BailingHybridForCausalLM",
        config=ConfigTable(
            fields=(
                *(field for field in dense_fields() if field.mca not in _OWN_KEYS),
                *LATENT_FIELDS,
                SCALED,
                Field("max_position_embeddings", "model_max_length", 1 << 18),
                Field("num_moe_experts", "num_experts"),
                Field("moe_router_topk", "num_experts_per_token"),
                Field("moe_ffn_hidden_size", "moe_intermediate_size"),
            ),
            defaults=_SIZES,
            constants={**KIMI.table.constants, "linear_low_rank_gates": False, "latent_head_gate": True},
            fixed=(
                *(SILU, NO_ATTENTION_BIAS),
                Fixed(
                    "moe_renormalize", (True,), "Megatron normalizes sigmoid scores over the chosen experts"
                ),
                Fixed("tie_word_embeddings", (False,), "transformers ties them in no model of this family"),
            ),
            aliases={**KIMI.table.aliases, "num_mtp_layers": "num_nextn_predict_layers"},
            facts=(Lens(read, write),),
        ),
        params=params,
        moe=NAMES,
        module_names={MODULES: True},
    )
)
