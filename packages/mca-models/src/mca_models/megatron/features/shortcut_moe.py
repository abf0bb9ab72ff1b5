"""Shortcut MoE (LongCat Flash): the experts' output is added after the next layer, in parallel to which they can run.

Layers come in pairs. In the first one the experts and the MLP, which Megatron has as a shared expert, take the same
input; the MLP's output is added at once. The experts' output goes to the second layer as Megatron's ``context``, the
only other tensor that layers pass on, also through recomputation.
"""

from collections.abc import Iterator
from functools import cache

from torch import Tensor
from torch.nn.functional import dropout

from mca_models.megatron.features.feature import (
    Context,
    Feature,
    Setup,
    SpecChanges,
    norm_recompute_problems,
    shared_expert_overlap_problems,
)
from mca_models.megatron.types import WithBias


@cache
def with_separate_experts(expert_layer: type) -> type:
    """Return an MoE layer class whose bias output holds the routed experts' output."""

    class SeparateExperts(expert_layer):  # type: ignore[misc]
        """Dense MLP and experts whose outputs are not added."""

        def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> WithBias:
            """Map ``[s, b, hidden]`` to the MLP's and the experts' output."""
            dense: Tensor = super().shared_experts_compute(hidden_states)
            routed, _ = super().forward(hidden_states, *args, **kwargs)
            return dense, routed

        def shared_experts_compute(self, hidden_states: Tensor) -> None:
            """Do nothing: ``forward`` computes it outside of the experts' recomputation."""

    return SeparateExperts


@cache
def with_shortcut(layer: type) -> type:
    """Return a decoder layer class that passes its experts' output on and adds that of the previous layer."""

    class Shortcut(layer):  # type: ignore[misc]
        """One layer of a pair: the first has experts, the second adds their output."""

        routed: Tensor | None = None

        def forward(self, *args: object, context: Tensor | None = None, **kwargs: object) -> WithBias:
            """Map ``[s, b, hidden]`` to the same shape, and return the output that is still to be added."""
            hidden_states, _ = super().forward(*args, **kwargs)
            routed, self.routed = self.routed, None
            return hidden_states if context is None else hidden_states + context, routed

        def _forward_post_mlp(self, outputs: WithBias, residual: Tensor) -> Tensor:
            output, routed = outputs
            self.routed = routed if routed is None else dropout(routed, self.hidden_dropout, self.training)
            added: Tensor = super()._forward_post_mlp((output, None), residual)
            return added

    return Shortcut


def _spec(context: Context) -> SpecChanges:
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_layer import TransformerLayer

    return SpecChanges(classes={MoELayer: with_separate_experts, TransformerLayer: with_shortcut})


def _problems(setup: Setup) -> Iterator[str]:
    yield from shared_expert_overlap_problems(setup)
    yield from norm_recompute_problems(setup)


SHORTCUT_MOE = Feature(
    name="shortcut MoE",
    enabled=lambda config: config.moe is not None and config.moe.moe_shortcut,
    problems=_problems,
    spec=_spec,
)
