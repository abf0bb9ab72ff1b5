"""Experts on a shortcut (LongCat Flash): what they give is added behind the next layer, beside which they can run.

Layers come in pairs. In the first one the experts and the MLP, which Megatron has as a shared expert, take the same
input; the MLP's output is added at once. What the experts gave goes to the second layer as Megatron's ``context``, the
one thing that layers hand on besides the hidden states, through recomputation too.
"""

import copy
from collections.abc import Callable
from functools import cache

from torch import Tensor
from torch.nn.functional import dropout

from mca_models.megatron.types import MegatronConfig, MegatronModule, WithBias


@cache
def with_separate_experts(expert_layer: type) -> type:
    """Megatron's expert layer, which gives its shared expert's output, and instead of a bias that of the others."""

    class SeparateExperts(expert_layer):  # type: ignore[misc]
        """An MLP and experts, whose outputs are not added up."""

        def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> WithBias:
            """``[s, b, hidden]`` to the MLP's and the experts' output."""
            beside: Tensor = super().shared_experts_compute(hidden_states)
            routed, _ = super().forward(hidden_states, *args, **kwargs)
            return beside, routed

        def shared_experts_compute(self, hidden_states: Tensor) -> None:
            """Nothing: ``forward`` computes it outside of what is recomputed with the experts."""

    return SeparateExperts


@cache
def with_shortcut(layer: type) -> type:
    """Megatron's decoder layer, which hands on what its experts give, and adds what the layer before handed on."""

    class Shortcut(layer):  # type: ignore[misc]
        """One layer of a pair: the first one has experts, the second one takes their output."""

        routed: Tensor | None = None

        def forward(self, *args: object, context: Tensor | None = None, **kwargs: object) -> WithBias:
            """``[s, b, hidden]`` to the same, and what is still to be added."""
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
    """Megatron's expert layer with ``count`` more experts, which give a token back as it is.

    The router knows them; no token is sent to them, as they are added where the token is.
    """

    class WithIdentity(expert_layer):  # type: ignore[misc]
        """Experts of which the last ones have no weights."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.kept: Tensor | None = None
            dispatcher = self.token_dispatcher
            if hasattr(dispatcher, "preprocess"):  # of all-to-all
                dispatcher.preprocess = _counting(dispatcher, dispatcher.preprocess)

        def preprocess(
            self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor
        ) -> tuple[Tensor, Tensor]:
            """What is sent to the experts with weights."""
            weights = probs[:, -count:].sum(-1).view(*hidden_states.shape[:-1], 1)
            self.kept = (hidden_states * weights).to(hidden_states.dtype)
            sent: tuple[Tensor, Tensor] = super().preprocess(
                hidden_states, probs[:, :-count].contiguous(), routing_map[:, :-count].contiguous()
            )
            return sent

        def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
            """What all experts give."""
            kept, self.kept = self.kept, None
            given: Tensor = super().postprocess(output, shared_expert_output)
            return given if kept is None else given + kept

    return WithIdentity


def _counting(
    dispatcher: MegatronModule, preprocess: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """``dispatcher.preprocess``, which takes each token to be sent as often as it has experts."""

    def counted(routing_map: Tensor) -> Tensor:
        tokens = preprocess(routing_map)
        dispatcher.num_out_tokens = int(routing_map.sum())
        return tokens

    return counted


@cache
def router_with_identity_experts(router: type, count: int) -> type:
    """A router class for ``count`` more experts than the model's layers have weights of."""

    class RouterWithIdentityExperts(router):  # type: ignore[misc]
        """Megatron's router."""

        def __init__(self, config: MegatronConfig, *args: object, **kwargs: object) -> None:
            own = copy.copy(config)
            own.num_moe_experts += count
            super().__init__(own, *args, **kwargs)

    return RouterWithIdentityExperts
