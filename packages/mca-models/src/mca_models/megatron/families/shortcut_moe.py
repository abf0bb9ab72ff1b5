"""Shortcut MoE (LongCat Flash): the experts' output is added after the next layer, in parallel to which they can run.

Layers come in pairs. In the first one the experts and the MLP, which Megatron has as a shared expert, take the same
input; the MLP's output is added at once. The experts' output goes to the second layer as Megatron's ``context``, the
only other tensor that layers pass on, also through recomputation.
"""

import copy
from collections.abc import Callable
from functools import cache

from torch import Tensor
from torch.nn.functional import dropout

from mca_models.megatron.types import MegatronConfig, MegatronModule, WithBias


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


@cache
def with_identity_experts(expert_layer: type, count: int) -> type:
    """Return an MoE layer class with ``count`` identity (zero-compute) experts.

    The router routes to them, but no token is sent: their output is added on the token's rank.
    """

    class IdentityExperts(expert_layer):  # type: ignore[misc]
        """MoE layer whose last experts are identities."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.identity: Tensor | None = None
            dispatcher = self.token_dispatcher
            if hasattr(dispatcher, "preprocess"):  # all-to-all dispatcher
                dispatcher.preprocess = _with_token_count(dispatcher, dispatcher.preprocess)

        def preprocess(
            self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor
        ) -> tuple[Tensor, Tensor]:
            """Return the input of the experts with weights."""
            weights = probs[:, -count:].sum(-1).view(*hidden_states.shape[:-1], 1)
            self.identity = (hidden_states * weights).to(hidden_states.dtype)
            sent: tuple[Tensor, Tensor] = super().preprocess(
                hidden_states, probs[:, :-count].contiguous(), routing_map[:, :-count].contiguous()
            )
            return sent

        def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
            """Return the sum of all experts' outputs."""
            identity, self.identity = self.identity, None
            total: Tensor = super().postprocess(output, shared_expert_output)
            return total if identity is None else total + identity

    return IdentityExperts


def _with_token_count(
    dispatcher: MegatronModule, preprocess: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """Return ``dispatcher.preprocess`` with a correct token count; Megatron assumes topk sends per token."""

    def counted(routing_map: Tensor) -> Tensor:
        tokens = preprocess(routing_map)
        dispatcher.num_out_tokens = int(routing_map.sum())
        return tokens

    return counted


@cache
def router_with_identity_experts(router: type, count: int) -> type:
    """Return a router class for ``count`` more experts than the layers have weights of."""

    class RouterIdentityExpertsExperts(router):  # type: ignore[misc]
        """Megatron's router."""

        def __init__(self, config: MegatronConfig, *args: object, **kwargs: object) -> None:
            extended = copy.copy(config)
            extended.num_moe_experts += count
            super().__init__(extended, *args, **kwargs)

    return RouterIdentityExpertsExperts
