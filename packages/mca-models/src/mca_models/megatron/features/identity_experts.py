"""Identity (zero-compute) experts, which return a token unchanged (LongCat Flash)."""

import copy
from collections.abc import Callable, Iterator
from functools import cache

from torch import Tensor

from mca_config.model.section import given
from mca_models.megatron.features.feature import Feature, Setup, change_moe_layer
from mca_models.megatron.types import MegatronConfig, MegatronModule


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


def _problems(setup: Setup) -> Iterator[str]:
    """Yield what needs the same number of experts for each token."""
    if setup.settings.get("moe_expert_capacity_factor") is not None:
        yield "identity experts have no capacity; remove moe_expert_capacity_factor"
    if setup.settings.get("moe_token_dispatcher_type") == "flex":
        yield (
            "moe_token_dispatcher_type flex is not supported with identity experts, because it sends each token to the "
            "same number of experts; use alltoall or allgather"
        )


IDENTITY_EXPERTS = Feature(
    name="identity experts",
    enabled=lambda config: config.moe is not None and config.moe.moe_identity_experts > 0,
    problems=_problems,
    spec=lambda context: change_moe_layer(
        lambda experts: with_identity_experts(experts, given(context.config.moe).moe_identity_experts)
    ),
    router=lambda router, config: router_with_identity_experts(
        router, given(config.moe).moe_identity_experts
    ),
)
