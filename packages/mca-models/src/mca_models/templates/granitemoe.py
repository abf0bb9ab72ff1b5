"""Granite 3 with experts: HF ``GraniteMoeForCausalLM``: stacked experts, Granite's factors."""

from collections.abc import Sequence

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_models.templates import granite
from mca_models.templates.common import attention, embedding, head, inner
from mca_models.templates.config_table import NO_ATTENTION_BIAS, SILU, ConfigTable
from mca_models.templates.family import Family
from mca_models.templates.moe import aux_loss, detect_stacked_experts, expert_fields, restore_aux_loss
from mca_models.weights import GATED, ROW, Param, expand_rules

CONFIG = ConfigTable(
    fields=(
        *granite.CONFIG.fields,
        *expert_fields(count="num_local_experts", default=8, ffn="intermediate_size"),
    ),
    defaults={"num_experts_per_tok": 2},
    fixed=(SILU, NO_ATTENTION_BIAS),
    derive=aux_loss,
    restore=restore_aux_loss,
)


BLOCK = "block_sparse_moe."
FILES = ("router.layer.weight", "input_linear.weight", "output_linear.weight")
MEMORY = ("router.weight", "experts.gate_up_proj", "experts.down_proj")


def shared_mlp(config: McaModelConfig) -> list[Param]:
    """Shared expert of every layer, in addition to the routed ones."""
    if not given(config.moe).moe_shared_expert_intermediate_size:
        return []
    return [
        inner("mlp.shared_experts.linear_fc1.weight", "shared_mlp.input_linear.weight", shard=GATED),
        inner("mlp.shared_experts.linear_fc2.weight", "shared_mlp.output_linear.weight", shard=ROW),
    ]


def expert_layers(config: McaModelConfig, layers: Sequence[int]) -> list[Param]:
    """Experts, router and shared expert of ``layers``, with the norm before them."""
    router, fc1, fc2 = (BLOCK + name for name in (MEMORY if config.extra.get("fused_experts") else FILES))
    experts = [
        inner("mlp.experts.linear_fc1.weight{expert}", fc1, shard=GATED, stacked=True),
        inner("mlp.experts.linear_fc2.weight{expert}", fc2, shard=ROW, stacked=True),
    ]
    rules = [
        inner("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        inner("mlp.router.weight", router),
        *shared_mlp(config),
    ]
    own = expand_rules(experts, layers=layers, experts=range(config.num_experts))
    return [*expand_rules(rules, layers=layers), *own]


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    layers = range(config.num_layers)
    before = expand_rules(attention(config), layers=layers)
    return [embedding(), *before, *expert_layers(config, layers), *head(config)]


FAMILY = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    config=CONFIG,
    params=params,
    detect_extra=detect_stacked_experts,
)
