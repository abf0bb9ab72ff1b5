"""Fixes for experts with output biases, one module per expert.

Megatron adds the bias in place to a view, which autograd rejects: the output of each last projection is copied first.
It also marks the bias for the gradient sum of sequence parallelism, over tensor ranks with other experts.
"""

from mca_models.megatron.features.feature import Feature
from mca_models.megatron.types import GptModel, MegatronModule, WithBias


def fix_expert_biases(model: GptModel) -> None:
    """Fix every expert module of a chunk."""
    for layer in model.decoder.layers:
        for expert in getattr(getattr(layer.mlp, "experts", None), "local_experts", ()):
            expert.linear_fc2.register_forward_hook(_copied)
            expert.linear_fc2.bias.sequence_parallel = False


def _copied(linear: MegatronModule, args: tuple[object, ...], output: WithBias) -> WithBias:
    value, bias = output
    return value.clone(), bias


BIASED_EXPERTS = Feature(
    name="experts with biases",
    enabled=lambda config: config.moe is not None and config.mlp.add_bias_linear,
    settings=lambda config: {"bias_dropout_fusion": False},  # grouped experts reject it
    finish=lambda model, config: fix_expert_biases(model),
)
