"""Rollout routing replay (R3): routers take given experts instead of choosing them, and weigh them by the live scores.

Every router of a decoder layer chooses its experts with a `ReplayableTopK`, in place of Megatron's ``RouterReplay``,
which is the only hook into the choice. The experts of a micro-batch are set before each forward pass of a chunk, and
again before its backward pass, whose recomputation routes once more. MTP layers always choose: engines return no
experts for them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.feature import Feature
from mca_models.megatron.types import GptModel, MegatronConfig, MegatronModule

LIVE = -1
"""Expert id of a token whose experts the router chooses, such as padding."""


@dataclass
class ReplayableTopK:
    """Top-k choice of a router, from its scores or from given experts.

    Subclasses choose and weigh in other ways than Megatron.

    Attributes:
        layer_number: Set by Megatron.
        given: ``[tokens, topk]``: experts of the running pass, `LIVE` for tokens without; None: none are given.
        waiting: Whether no pass has used `given` yet.
        recorded: Experts of each pass, ``[tokens, topk]``; None: not recorded.
        supply: Sets `given` for each pass, from its number of tokens; None: `set_routed_experts` does.
    """

    layer_number: int | None = field(default=None, kw_only=True)
    given: Tensor | None = field(default=None, kw_only=True)
    waiting: bool = field(default=False, kw_only=True)
    recorded: list[Tensor] | None = field(default=None, kw_only=True)
    supply: Callable[[int], Tensor | None] | None = field(default=None, kw_only=True)

    def get_replay_topk(self, scores: Tensor, topk: int, *options: MegatronModule) -> tuple[Tensor, Tensor]:
        """Return the scores and the indices of each token's experts, both ``[tokens, topk]``; Megatron calls this.

        Args:
            scores: ``[tokens, experts]``.
            topk: Experts of a token.
            options: Megatron's numbers of groups, and its own choice.
        """
        values, chosen = self.choose(scores, topk, *options)
        if self.supply is not None:
            self.given = self.supply(len(scores))
        if self.given is not None:
            if self.given.shape != chosen.shape:
                raise RuntimeError(
                    f"layer {self.layer_number} has {list(chosen.shape)} experts, given are {list(self.given.shape)}"
                )
            live = (self.given == LIVE).all(-1, keepdim=True)
            chosen = torch.where(live, chosen, self.given.to(chosen))
            values = torch.where(live, values, self.weigh(scores, chosen))
            self.waiting = False
        if self.recorded is not None:
            self.recorded.append(chosen)
        return values, chosen

    def choose(self, scores: Tensor, topk: int, *options: MegatronModule) -> tuple[Tensor, Tensor]:
        """Return the values and the indices of the experts that the router chooses."""
        *groups, default = options
        values, chosen = default(scores, topk, *groups)
        return values, chosen

    def weigh(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return the values ``[tokens, topk]`` of ``chosen`` experts that are given."""
        return scores.gather(1, chosen)


def router_with_choice(router: type, choice: Callable[[MegatronModule], ReplayableTopK]) -> type:
    """Return a subclass of ``router`` that chooses its experts with the result of ``choice(router)``."""

    class RouterWithChoice(router):  # type: ignore[misc]
        """Megatron's router."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.router_replay = choice(self)

    return RouterWithChoice


@dataclass(frozen=True)
class RoutedExperts:
    """Shape of a model's routed experts: ``[..., layers, topk]`` expert ids.

    Args:
        layers: Decoder layers with experts.
        num_layers: All decoder layers.
        topk: Experts of a token.
        num_experts: Outputs of a router.
    """

    layers: tuple[int, ...]
    num_layers: int
    topk: int
    num_experts: int

    @classmethod
    def from_config(cls, config: McaModelConfig) -> "RoutedExperts | None":
        """Return the shape of ``config``'s routed experts; None for a dense model."""
        if config.moe is None:
            return None
        layers = tuple(layer for layer in range(config.num_layers) if config.is_moe_layer(layer))
        return cls(layers, config.num_layers, config.moe.moe_router_topk, config.moe.num_router_choices)

    def checked(self, experts: Tensor, where: str) -> Tensor:
        """Return ``experts`` ``[..., layers with experts, topk]`` as int16.

        Args:
            experts: ``[..., layers, topk]`` for the layers with experts or for all decoder layers.
            where: Beginning of an error, such as the name of the argument.

        Raises:
            McaError: A size or an expert id is wrong, or a token has an expert twice.
        """
        if experts.is_floating_point() or experts.is_complex() or experts.dtype == torch.bool:
            raise McaError(f"{where} has dtype {experts.dtype}; expected integers, the ids of experts")
        if experts.dtype not in (torch.int16, torch.int32, torch.int64):
            experts = experts.int()  # torch compares and indexes few of the others
        layers, topk = experts.shape[-2:] if experts.ndim > 1 else (0, 0)
        if layers not in (len(self.layers), self.num_layers):
            every = f" or all {self.num_layers}" if len(self.layers) < self.num_layers else ""
            raise McaError(
                f"{where} has shape {list(experts.shape)}; expected [..., layers, topk] with the "
                f"{len(self.layers)} layers that have experts{every}"
            )
        if topk != self.topk:
            raise McaError(f"{where} has {topk} experts per token and layer; the model routes to {self.topk}")
        if layers != len(self.layers):
            experts = experts[..., list(self.layers), :]
        least, most = (int(end) for end in experts.aminmax()) if experts.numel() else (0, 0)
        if least < LIVE or most >= self.num_experts:
            raise McaError(
                f"{where} has expert {least if least < LIVE else most}; expected 0 to {self.num_experts - 1}, or "
                f"{LIVE} for all experts of a token whose experts the router shall choose"
            )
        self._require_distinct(experts, where)
        return experts.to(torch.int16)

    def _require_distinct(self, experts: Tensor, where: str) -> None:
        """Raise if a token has an expert twice, or `LIVE` and an expert."""
        twice = torch.zeros(experts.shape[:-1], dtype=torch.bool, device=experts.device)
        for shift in range(1, self.topk // 2 + 1):
            twice |= (experts == experts.roll(shift, -1)).any(-1)
        live = experts == LIVE
        wrong = torch.where(live.any(-1), ~live.all(-1), twice)
        if bool(wrong.any()):
            raise McaError(
                f"{where} has {experts[wrong][0].tolist()} as the experts of a token; expected {self.topk} different "
                f"ones, or only {LIVE}"
            )


def require_experts(config: McaModelConfig, where: str) -> RoutedExperts:
    """Return the shape of a model's routed experts.

    Raises:
        McaError: The model has no experts.
    """
    shape = RoutedExperts.from_config(config)
    if shape is None:
        raise McaError(f"{where} needs a model with experts, but {config.model_type} is dense; remove it")
    return shape


def checked_experts(config: McaModelConfig, experts: Tensor, where: str) -> Tensor:
    """Return `RoutedExperts.checked` of a model's experts.

    Raises:
        McaError: The model has no experts, or ``experts`` are wrong.
    """
    return require_experts(config, where).checked(experts, where)


def set_routed_experts(model: GptModel, experts: Tensor | None) -> None:
    """Set the experts of the next forward or backward pass of a chunk; None: its routers choose.

    Args:
        model: A chunk, wrapped or not.
        experts: ``[b, s / cp, layers with experts, topk]``: this context-parallel rank's tokens.

    Raises:
        McaError: The routers cannot take given experts.
    """
    choices = _choices(model)
    if experts is None:
        for _, choice in choices:
            choice.given, choice.waiting = None, False
        return
    require_replayable(model.config)
    if model.config.sequence_parallel:
        group = model.config.tensor_model_parallel_size
        experts = experts.chunk(group, 1)[_tensor_rank()]
    for number, choice in choices:
        choice.given = experts[:, :, number].transpose(0, 1).flatten(0, 1).long()
        choice.waiting = True


def require_replayed(model: GptModel) -> None:
    """Raise unless every router of a chunk has used the experts that `set_routed_experts` gave it.

    Raises:
        McaError: A router chose its experts itself.
    """
    missed = [choice.layer_number for _, choice in _choices(model) if choice.waiting]
    if missed:
        raise McaError(f"routed_experts: the routers of layers {missed} ignored the given experts")


def replay_in_backward(model: GptModel, experts: Tensor | None, output: Tensor) -> None:
    """Set ``experts`` again right before the backward pass of ``output``, after other micro-batches' passes."""
    if output.requires_grad and _choices(model):
        output.register_hook(lambda gradient: set_routed_experts(model, experts))


@contextmanager
def routed_passes(models: Sequence[GptModel], *, record: bool = False) -> Iterator[None]:
    """Run passes with given experts in this block, after which routers choose again.

    An inner block clears the given experts, and only one of nested blocks may record.

    Args:
        models: Chunks, wrapped or not.
        record: Record the experts of each pass.

    Raises:
        McaError: The routers do not report the experts that they choose.
    """
    for model in models if record else ():
        if choices := _choices(model):
            require_replayable(model.config)
        for _, choice in choices:
            choice.recorded = []
    try:
        yield
    finally:
        for model in models:
            set_routed_experts(model, None)
            for _, choice in _choices(model) if record else ():
                choice.recorded = None


def recorded_experts(model: GptModel) -> list[tuple[int, list[Tensor]]]:
    """Return for each router the index among layers with experts, and its experts ``[tokens, topk]`` of each pass."""
    return [(number, choice.recorded or []) for number, choice in _choices(model)]


def _choices(model: GptModel) -> list[tuple[int, ReplayableTopK]]:
    """Return the choices of a chunk's routers, each with its index among all layers with experts."""
    from megatron.core.utils import get_attr_wrapped_model

    found: list[tuple[int, ReplayableTopK]] = get_attr_wrapped_model(model, "router_choices")
    return found


def require_replayable(config: MegatronConfig) -> None:
    """Raise unless the routers choose where experts can be given to them.

    Raises:
        McaError: A fused kernel or Sinkhorn's algorithm chooses.
    """
    kinds = config.moe_router_load_balancing_type
    if config.moe_router_fusion:
        raise McaError(
            "routed_experts are not supported with moe_router_fusion, whose kernel chooses; set it to false"
        )
    if "sinkhorn" in ([kinds] if isinstance(kinds, str) else kinds):
        raise McaError(
            "routed_experts are not supported with moe_router_load_balancing_type sinkhorn; set another one"
        )


def _tensor_rank() -> int:
    from megatron.core.parallel_state import get_tensor_model_parallel_rank

    rank: int = get_tensor_model_parallel_rank()
    return rank


def make_replayable(model: GptModel, config: McaModelConfig) -> None:
    """Let the routers of a chunk's decoder layers choose with `ReplayableTopK`, and list them."""
    shape = RoutedExperts.from_config(config)
    model.router_choices = []
    if shape is None:
        return
    for layer in model.decoder.layers:
        router = getattr(layer.mlp, "router", None)
        if router is None:
            continue
        if not isinstance(router.router_replay, ReplayableTopK):
            router.router_replay = ReplayableTopK(layer_number=layer.layer_number)
        model.router_choices.append((shape.layers.index(layer.layer_number - 1), router.router_replay))


ROUTER_REPLAY = Feature(name="replay of routed experts", enabled=lambda config: True, finish=make_replayable)
