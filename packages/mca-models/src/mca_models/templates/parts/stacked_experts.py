"""Experts of a layer in two tensors, under Granite's names."""

from collections.abc import Sequence

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_models.templates.parts.common import inner
from mca_models.weights import GATED, ROW, Param, expand_rules

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
    own = expand_rules(experts, layers=layers, experts=range(given(config.moe).num_moe_experts or 0))
    return [*expand_rules(rules, layers=layers), *own]
