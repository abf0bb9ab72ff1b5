"""Experts' auxiliary losses as they are defined, on every layout, and what is counted for experts' biases.

The loss of a step is ``cross entropy + sum over layers of coefficient x auxiliary loss``, where the cross entropy is
the mean over the targets of the global batch (a custom loss: over what that counts) and the auxiliary loss of a layer
that over its tokens, padding left out. With E experts of which each token is sent to k, ``c_e`` tokens that are sent
to expert e, ``p_e`` the mean of the routers' scores for it, of T tokens, the balancing loss of these tokens is
``E / (k T) x sum over e of c_e p_e``:

- ``aux_loss``: of each micro-batch,
- ``seq_aux_loss``: of each sequence, in packed rows too,
- ``global_aux_loss``: of the global batch.

Scores are Megatron's, which sum to 1 for a token; with the coefficient of ``config.json`` they are Hugging Face's: a
softmax of the logits, also where the router itself takes sigmoids.

A micro-batch and a sequence weigh as much as their tokens. The z-loss is the mean of ``logsumexp(logits)^2``.

Megatron's own (0.16.1 and 0.19.2) depend on the layout: they weigh a rank by its own tokens, take a packed row for one
sequence, all sequences for equally long, for the global batch that which has come so far, and prediction layers'
padding for tokens. Routers of a trained model compute with the functions below instead.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from mca_models.megatron.factory.transformer_config import HF_AUX_LOSS
from mca_train import groups
from mca_train.losses.moe_sequence_ids import carry_tokens, numbers_of, prediction_routers
from mca_train.losses.step_counts import StepCounts
from mca_train.types import Chunk, Router, Upstream


@dataclass
class Balance:
    """What a router is told of the running step, and what it finds out.

    Args:
        depth: How many tokens further ahead than one its layer predicts; 0 in the decoder.
    """

    depth: int
    items_per_token: float = 1.0
    """What the model's loss is divided by, over `tokens`."""
    tokens: float = 1.0
    """That count for this router, of the step on all ranks."""
    num_segments: int = 1
    """Sequences of a micro-batch at most."""
    load: Tensor | None = None
    """``[experts]``: tokens of the step that are sent to each, if it was counted before; else None."""
    counting: bool = False
    """The running pass only counts `load`."""
    capacity: float | None = None
    """``moe_expert_capacity_factor``."""
    logits: Tensor | None = None
    """``[tokens, experts]`` of the running call."""
    segments: Tensor | None = None
    """``[tokens]`` of the running call: whose tokens these are."""
    found: dict[str, Tensor] = field(default_factory=dict)
    """The losses of the step, this rank's share, without their coefficients."""

    def attach(self, carrier: Tensor, name: str, value: Tensor, coefficient: float) -> Tensor:
        """``carrier``, which now brings the gradient of a loss.

        Args:
            carrier: Something on the way from the router to the model's loss.
            name: Of the loss.
            value: This rank's share of it, times the tokens that it is the mean of.
            coefficient: Of the loss.
        """
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        share = value.detach().double() / self.tokens
        self.found[name] = self.found[name] + share if name in self.found else share
        result: Tensor = MoEAuxLossAutoScaler.apply(carrier, value * (coefficient * self.items_per_token))
        return result


def balance_experts(chunks: Iterable[torch.nn.Module]) -> None:
    """Has every router in ``chunks`` compute its losses by this module; a second time changes nothing."""
    for chunk in chunks:
        modules = list(routers((chunk,)))
        if not modules or "mca_balance" in vars(modules[0]):
            continue
        carry_tokens(chunk)
        depths = prediction_routers(chunk)
        for router in modules:
            router.mca_balance = Balance(
                depths.get(router, 0), capacity=router.config.moe_expert_capacity_factor
            )
            if router.mca_balance.capacity is not None:  # `_route` drops tokens, once they are counted
                router.config = copy.copy(router.config)
                router.config.moe_expert_capacity_factor = None
            for name, function in _OWN.items():
                setattr(router, name, partial(function, router))
            router.sinkhorn_load_balancing = partial(_sinkhorn, router, router.sinkhorn_load_balancing)
            router.routing = partial(_route, router, router.routing)


def routers(chunks: Iterable[torch.nn.Module]) -> Iterable[Chunk]:
    """All routers of experts."""
    from megatron.core.transformer.moe.router import TopKRouter

    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter))


def begin_step(chunks: Iterable[torch.nn.Module], counts: StepCounts) -> None:
    """Tells the routers of ``chunks`` what the coming step has."""
    for router in routers(chunks):
        balance: Balance = router.mca_balance
        balance.tokens = max(counts.tokens[balance.depth], 1.0)
        balance.items_per_token = counts.targets[0] / balance.tokens
        balance.num_segments = counts.num_segments
        balance.load = None
        balance.found.clear()


def has_losses(config: Upstream) -> bool:
    """Whether routers add losses to the model's, by Megatron's configuration of the whole model."""
    return bool(config.num_moe_experts) and bool(_balanced_by(config) or config.moe_z_loss_coeff)


def balances_globally(config: Upstream) -> bool:
    """Whether routers need to know all of a step before its first micro-batch.

    Args:
        config: Megatron's, of the whole model: a pipeline stage without routers takes part as well.
    """
    return bool(config.num_moe_experts) and "global_aux_loss" in _balanced_by(config)


def _balanced_by(config: Upstream) -> set[str]:
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(kinds, str):
        kinds, coefficients = [kinds], [coefficients]
    found = {kind for kind, each in zip(kinds, coefficients, strict=True) if each}
    return found & {"aux_loss", "seq_aux_loss", "global_aux_loss"}


def count_load(chunks: Iterable[torch.nn.Module], forward: Callable[[], object]) -> None:
    """Counts over all ranks what each expert is sent in the passes that ``forward`` makes; collective."""
    found = list(routers(chunks))
    for router in found:
        router.mca_balance.counting = True
        router.mca_balance.load = torch.zeros(router.num_experts, device=router.weight.device)
    try:
        with torch.no_grad():
            forward()
    finally:
        for router in found:
            router.mca_balance.counting = False
    for router in found:
        router.mca_balance.load = groups.sum_over(router.mca_balance.load, router.tp_dp_cp_group)


def _route(router: Router, plain: Upstream, logits: Tensor, padding_mask: Tensor | None = None) -> Upstream:
    balance: Balance = router.mca_balance
    balance.segments = numbers_of(padding_mask, logits)
    padding = None if padding_mask is None else (balance.segments < 0).view(logits.shape[:2])
    if balance.counting:
        balance.load += _sent(router, logits.flatten(0, 1)).sum(0)  # type: ignore[operator]
    balance.logits = logits.flatten(0, 1)
    routed = plain(logits, padding)
    balance.logits = None
    return routed if balance.capacity is None else _within_capacity(router, *routed)


def _within_capacity(router: Router, weights: Tensor, sent: Tensor) -> Upstream:
    """What is left, both ``[tokens, experts]``, where experts take a limited number; padding takes nobody's place."""
    from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping

    real = _segments(router.mca_balance) >= 0
    counts = (real | ~real.any()).unsqueeze(-1)  # padding alone is sent: not every kernel takes no tokens
    return apply_router_token_dropping(
        weights * counts,
        sent & counts,
        router_topk=router.topk,
        capacity_factor=router.mca_balance.capacity,
        drop_policy=router.config.moe_token_drop_policy,
        pad_to_capacity=router.config.moe_pad_expert_input_to_capacity,
    )


def _sinkhorn(router: Router, plain: Upstream, logits: Tensor) -> Upstream:
    """``sinkhorn_load_balancing``; in training, which distributes tokens evenly, padding is no part of them."""
    weights, sent = plain(logits)
    counted = _segments(router.mca_balance) >= 0
    if not router.training or counted.all() or not counted.any():
        return weights, sent
    counting = counted.nonzero().squeeze(-1)
    own_weights, own_sent = plain(logits[counting])
    return weights.index_copy(0, counting, own_weights), sent.index_copy(0, counting, own_sent)


def _sent(router: Router, logits: Tensor) -> Tensor:
    from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss

    sent, _ = compute_routing_scores_for_aux_loss(
        logits,
        router.topk,
        router.score_function,
        fused=router.config.moe_router_fusion,
        padding_mask=router.mca_balance.segments < 0,
    )
    result: Tensor = sent
    return result


def _of_micro_batch(router: Router, probs: Tensor, scores: Tensor, sent: Tensor, **_: object) -> Tensor:
    """``aux_loss``. Scores and what is sent: ``[tokens, experts]``, 0 for padding."""
    coefficient = router.get_aux_loss_coeff("aux_loss")
    if not coefficient:
        return probs
    load = groups.sum_over(sent.sum(0), router.tp_cp_group)
    return _attached(router, probs, "load_balancing_loss", _balance(router, scores, load), coefficient)


def _of_sequences(
    router: Router, probs: Tensor, scores: Tensor, sent: Tensor, *_: object, **__: object
) -> Tensor:
    """``seq_aux_loss``."""
    coefficient = router.get_aux_loss_coeff("seq_aux_loss")
    if not coefficient:
        return probs
    balance: Balance = router.mca_balance
    whose = _segments(balance).clamp(min=0)
    empty = torch.zeros(balance.num_segments, sent.shape[1], device=sent.device)
    load = groups.sum_over(empty.index_add(0, whose, sent.float()), router.tp_cp_group)
    value = _balance(router, scores, load, whose)
    return _attached(router, probs, "seq_load_balancing_loss", value, coefficient)


def _of_step(router: Router, probs: Tensor, scores: Tensor, sent: Tensor, **_: object) -> Tensor:
    """``global_aux_loss``."""
    coefficient = router.get_aux_loss_coeff("global_aux_loss")
    if not coefficient:
        return probs
    load = router.mca_balance.load
    if load is None:
        load = groups.sum_over(sent.sum(0), router.tp_dp_cp_group)
    return _attached(router, probs, "global_load_balancing_loss", _balance(router, scores, load), coefficient)


def _balance(router: Router, scores: Tensor, load: Tensor, whose: Tensor | None = None) -> Tensor:
    """This rank's share of the balancing loss, times the tokens that it is of.

    Args:
        router: Whose.
        scores: ``[tokens, experts]``
        load: How many tokens are sent to each expert, ``[experts]``, or of each sequence, ``[sequences, experts]``.
        whose: Sequence of each token.
    """
    scores = _chances(router) if getattr(router.config, HF_AUX_LOSS, False) else scores
    share = load.float() * (router.num_experts / router.topk)
    share = share / (load.sum(-1, keepdim=True) / router.topk).clamp(min=1)
    value: Tensor = (scores * (share if whose is None else share[whose])).sum()
    return value


def _segments(balance: Balance) -> Tensor:
    """``[tokens]``: whose they are, padding below 0."""
    if balance.segments is None:
        raise RuntimeError("a loss of a router without its call")
    return balance.segments


def _chances(router: Router) -> Tensor:
    """``[tokens, experts]``: the softmax of logits, of which HF's loss is whatever the router's scores are."""
    balance: Balance = router.mca_balance
    if balance.logits is None:
        raise RuntimeError("a balancing loss without its router's call")
    counts = (_segments(balance) >= 0).unsqueeze(-1)
    return balance.logits.softmax(-1, dtype=torch.float32) * counts


def _attached(router: Router, probs: Tensor, name: str, value: Tensor, coefficient: float) -> Tensor:
    balance: Balance = router.mca_balance
    return balance.attach(probs, name, value, coefficient)


def _z_loss(router: Router, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    coefficient = router.config.moe_z_loss_coeff
    if coefficient is None or not router.training or not torch.is_grad_enabled():
        return logits
    squares = torch.logsumexp(logits, -1).square() * (router.mca_balance.segments >= 0)
    return _attached(router, logits, "z_loss", squares.sum(), coefficient)


def _count_for_bias(router: Router, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
    """Megatron takes the mask ``[tokens]`` beside ``[tokens, experts]``; in evaluation nothing is counted.

    Nor is it for a router that is frozen: biases without counts stay as they are.
    """
    if router.enable_expert_bias and torch.is_grad_enabled() and router.weight.requires_grad:
        with torch.no_grad():
            counts = routing_map & (router.mca_balance.segments >= 0).unsqueeze(-1)
            router.local_tokens_per_expert += counts.sum(0)


def keep_counts(chunks: Iterable[torch.nn.Module], kept: Tensor) -> None:
    """What was counted for experts' biases in the running step moves them only if ``kept``."""
    for router in routers(chunks):
        if router.enable_expert_bias:
            router.local_tokens_per_expert.mul_(kept)


_OWN: Mapping[str, Callable[..., Tensor | None]] = {
    "_apply_aux_loss": _of_micro_batch,
    "_apply_seq_aux_loss": _of_sequences,
    "_apply_global_aux_loss": _of_step,
    "apply_z_loss": _z_loss,
    "_apply_expert_bias": _count_for_bias,
}
"""Methods of Megatron's router by name, and what stands for them."""
