"""MoE auxiliary losses that are the same on every layout, and the token counts for expert biases.

The loss of a step is ``cross entropy + sum over layers of coefficient x auxiliary loss``. The cross entropy is the mean
over the targets of the global batch (a custom loss: over its own count). A layer's auxiliary loss is the mean over its
tokens without padding. With E experts, k experts per token, ``c_e`` tokens routed to expert e, ``p_e`` the mean router
score of expert e, and T tokens, the load balancing loss is ``E / (k T) x sum over e of c_e p_e``:

- ``aux_loss``: of each micro-batch,
- ``seq_aux_loss``: of each sequence, in packed rows too,
- ``global_aux_loss``: of the global batch.

Scores are Megatron's, which sum to 1 for a token. With the coefficient of ``config.json`` they are Hugging Face's: a
softmax of the logits, also for sigmoid routers.

A micro-batch and a sequence are weighted by their tokens. The z-loss is the mean of ``logsumexp(logits)^2``.

Megatron's own losses (0.16.1 and 0.19.2) depend on the layout. They weight a rank by its own tokens, treat a packed row
as one sequence and all sequences as equally long, use the part of the global batch seen so far, and count the padding
of MTP layers as tokens. Routers of a trained model use the functions below instead.

A router gets the sequence id of each token, -1 for padding. Megatron passes only a padding mask ``[b, s]`` through
stages and recomputation to the MoE layer, which converts it to booleans. Sequence ids therefore replace the mask, and
pass the MoE layer as boolean planes, the binary digits of the id. Two cases that Megatron leaves open:

- Pipeline stages after the first do not split the mask for sequence parallelism.
- MTP layers have no mask (0.16) or a mask shifted across the split (0.19). Here their mask covers the tokens that have
  enough tokens of their sequence after them, because the values at other positions differ between padded and
  packed batches.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import signature

import torch
from torch import Tensor

from mca_models.megatron.factory.transformer_config import HF_AUX_LOSS
from mca_train import groups
from mca_train.batching.micro_batch import MicroBatch
from mca_train.losses.token_loss import StepCounts
from mca_train.types import Chunk, Router, Upstream

_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss")
_PLANES = 16
"""Binary digits of a sequence id; the row of a micro-batch has less than 2^16 sequences."""


@dataclass
class AuxLossState:
    """A router's inputs for the running step, and its losses.

    Args:
        depth: Number of tokens that its layer predicts further ahead than the next one; 0 in the decoder.
    """

    depth: int
    items_per_token: float = 1.0
    """The model's loss count divided by `tokens`."""
    tokens: float = 1.0
    """Tokens of the step that this router routes, on all ranks, without padding."""
    num_segments: int = 1
    """Largest number of sequences in a micro-batch."""
    load: Tensor | None = None
    """``[experts]``: tokens of the step routed to each, if counted before the step; else None."""
    counting: bool = False
    """The running pass only counts `load`."""
    capacity: float | None = None
    """``moe_expert_capacity_factor``."""
    logits: Tensor | None = None
    """``[tokens, experts]`` of the running call."""
    segments: Tensor | None = None
    """``[tokens]`` of the running call: sequence ids."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    """This rank's share of the step's losses, without coefficients."""

    def attach(self, carrier: Tensor, name: str, value: Tensor, coefficient: float) -> Tensor:
        """Return ``carrier`` with the gradient of an auxiliary loss attached.

        Args:
            carrier: Tensor between the router and the model's loss.
            name: Name of the loss.
            value: This rank's share of the loss, times the tokens that it is averaged over.
            coefficient: Coefficient of the loss.
        """
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        share = value.detach().double() / self.tokens
        self.losses[name] = self.losses[name] + share if name in self.losses else share
        result: Tensor = MoEAuxLossAutoScaler.apply(carrier, value * (coefficient * self.items_per_token))
        return result


def install_aux_losses(chunks: Iterable[torch.nn.Module]) -> None:
    """Make every router in ``chunks`` compute its losses with this module; idempotent."""
    for chunk in chunks:
        modules = list(routers((chunk,)))
        if not modules or "mca_aux_loss" in vars(modules[0]):
            continue
        propagate_sequence_ids(chunk)
        depths = mtp_router_depths(chunk)
        for router in modules:
            router.mca_aux_loss = AuxLossState(
                depths.get(router, 0), capacity=router.config.moe_expert_capacity_factor
            )
            if router.mca_aux_loss.capacity is not None:  # `_route` drops tokens after counting
                router.config = copy.copy(router.config)
                router.config.moe_expert_capacity_factor = None
            for name, function in _ROUTER_METHODS.items():
                setattr(router, name, partial(function, router))
            router.sinkhorn_load_balancing = partial(_sinkhorn, router, router.sinkhorn_load_balancing)
            router.routing = partial(_route, router, router.routing)


def routers(chunks: Iterable[torch.nn.Module]) -> Iterable[Chunk]:
    """Return all MoE routers."""
    from megatron.core.transformer.moe.router import TopKRouter

    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter))


def begin_step(chunks: Iterable[torch.nn.Module], counts: StepCounts) -> None:
    """Set the counts of the coming step in the routers of ``chunks``."""
    for router in routers(chunks):
        state: AuxLossState = router.mca_aux_loss
        state.tokens = max(counts.tokens[state.depth], 1.0)
        state.items_per_token = counts.targets[0] / state.tokens
        state.num_segments = counts.num_segments
        state.load = None
        state.losses.clear()


def has_losses(config: Upstream) -> bool:
    """Return True if routers add auxiliary losses, from Megatron's configuration of the full model."""
    return bool(config.num_moe_experts) and bool(_balancing_kinds(config) or config.moe_z_loss_coeff)


def needs_global_load(config: Upstream) -> bool:
    """Return True if routers need the expert load of the whole step before its first micro-batch.

    Args:
        config: Megatron's, of the full model: a pipeline stage without routers takes part as well.
    """
    return bool(config.num_moe_experts) and "global_aux_loss" in _balancing_kinds(config)


def _balancing_kinds(config: Upstream) -> set[str]:
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(kinds, str):
        kinds, coefficients = [kinds], [coefficients]
    enabled = {kind for kind, value in zip(kinds, coefficients, strict=True) if value}
    return enabled & {*_BALANCING}


def count_expert_load(chunks: Iterable[torch.nn.Module], forward: Callable[[], object]) -> None:
    """Count the tokens routed to each expert on all ranks in the passes of ``forward``; collective."""
    all_routers = list(routers(chunks))
    for router in all_routers:
        router.mca_aux_loss.counting = True
        router.mca_aux_loss.load = torch.zeros(router.num_experts, device=router.weight.device)
    try:
        with torch.no_grad():
            forward()
    finally:
        for router in all_routers:
            router.mca_aux_loss.counting = False
    for router in all_routers:
        router.mca_aux_loss.load = groups.sum_over(router.mca_aux_loss.load, router.tp_dp_cp_group)


def _route(router: Router, plain: Upstream, logits: Tensor, padding_mask: Tensor | None = None) -> Upstream:
    state: AuxLossState = router.mca_aux_loss
    state.segments = decode_sequence_ids(padding_mask, logits)
    padding = None if padding_mask is None else (state.segments < 0).view(logits.shape[:2])
    if state.counting:
        state.load += _routing_map(router, logits.flatten(0, 1)).sum(0)  # type: ignore[operator]
    state.logits = logits.flatten(0, 1)
    routed = plain(logits, padding)
    state.logits = None
    return routed if state.capacity is None else _drop_over_capacity(router, *routed)


def _drop_over_capacity(router: Router, weights: Tensor, routing_map: Tensor) -> Upstream:
    """Drop tokens over the experts' capacity, both ``[tokens, experts]``; padding uses no capacity."""
    from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping

    real = _sequence_ids(router.mca_aux_loss) >= 0
    counts = (real | ~real.any())[:, None]  # padding alone is routed: some kernels need at least one token
    return apply_router_token_dropping(
        weights * counts,
        routing_map & counts,
        router_topk=router.topk,
        capacity_factor=router.mca_aux_loss.capacity,
        drop_policy=router.config.moe_token_drop_policy,
        pad_to_capacity=router.config.moe_pad_expert_input_to_capacity,
    )


def _sinkhorn(router: Router, plain: Upstream, logits: Tensor) -> Upstream:
    """Apply ``sinkhorn_load_balancing``; in training, which distributes tokens evenly, without padding."""
    weights, routing_map = plain(logits)
    counted = _sequence_ids(router.mca_aux_loss) >= 0
    if not router.training or counted.all() or not counted.any():
        return weights, routing_map
    counting = counted.nonzero().flatten()
    real_weights, real_map = plain(logits[counting])
    return weights.index_copy(0, counting, real_weights), routing_map.index_copy(0, counting, real_map)


def _routing_map(router: Router, logits: Tensor) -> Tensor:
    from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss

    routing_map, _ = compute_routing_scores_for_aux_loss(
        logits,
        router.topk,
        router.score_function,
        fused=router.config.moe_router_fusion,
        padding_mask=router.mca_aux_loss.segments < 0,
    )
    result: Tensor = routing_map
    return result


def _balancing_loss(
    kind: str, router: Router, probs: Tensor, scores: Tensor, routing_map: Tensor, *_: object, **__: object
) -> Tensor:
    """Attach the loss ``kind``. Scores and routing map: ``[tokens, experts]``, 0 for padding."""
    coefficient = router.get_aux_loss_coeff(kind)
    if not coefficient:
        return probs
    state: AuxLossState = router.mca_aux_loss
    sequences, load = None, state.load
    if kind == "seq_aux_loss":
        sequences = _sequence_ids(state).clamp(min=0)
        empty = torch.zeros(state.num_segments, routing_map.shape[1], device=routing_map.device)
        load = groups.sum_over(empty.index_add(0, sequences, routing_map.float()), router.tp_cp_group)
    elif kind == "aux_loss":
        load = groups.sum_over(routing_map.sum(0), router.tp_cp_group)
    elif load is None:
        load = groups.sum_over(routing_map.sum(0), router.tp_dp_cp_group)
    name = kind.replace("aux_loss", "load_balancing_loss")
    return state.attach(probs, name, _balance(router, scores, load, sequences), coefficient)


def _balance(router: Router, scores: Tensor, load: Tensor, sequences: Tensor | None = None) -> Tensor:
    """Return this rank's share of the balancing loss, times the tokens that it is averaged over.

    Args:
        router: The router.
        scores: ``[tokens, experts]``
        load: Tokens routed to each expert, ``[experts]``, or per sequence, ``[sequences, experts]``.
        sequences: Sequence of each token.
    """
    scores = _softmax_scores(router) if getattr(router.config, HF_AUX_LOSS, False) else scores
    share = load.float() * (router.num_experts / router.topk)
    share = share / (load.sum(-1, keepdim=True) / router.topk).clamp(min=1)
    value: Tensor = (scores * (share if sequences is None else share[sequences])).sum()
    return value


def _sequence_ids(state: AuxLossState) -> Tensor:
    """Return the sequence id of each token, ``[tokens]``, negative for padding."""
    if state.segments is None:
        raise RuntimeError("router loss outside of a router call")
    return state.segments


def _softmax_scores(router: Router) -> Tensor:
    """Return the softmax of the logits, ``[tokens, experts]``, which HF's loss uses with any router scores."""
    state: AuxLossState = router.mca_aux_loss
    if state.logits is None:
        raise RuntimeError("balancing loss outside of a router call")
    counts = (_sequence_ids(state) >= 0)[:, None]
    return state.logits.softmax(-1, dtype=torch.float32) * counts


def _z_loss(router: Router, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    coefficient = router.config.moe_z_loss_coeff
    if coefficient is None or not router.training or not torch.is_grad_enabled():
        return logits
    state: AuxLossState = router.mca_aux_loss
    squares = torch.logsumexp(logits, -1).square() * (_sequence_ids(state) >= 0)
    return state.attach(logits, "z_loss", squares.sum(), coefficient)


def _count_for_bias(router: Router, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
    """Count tokens for expert biases, in training only.

    Megatron applies a mask ``[tokens]`` to ``[tokens, experts]``, which fails. A frozen router counts nothing, so its
    biases stay as they are.
    """
    if router.enable_expert_bias and torch.is_grad_enabled() and router.weight.requires_grad:
        with torch.no_grad():
            counts = routing_map & (router.mca_aux_loss.segments >= 0)[:, None]
            router.local_tokens_per_expert += counts.sum(0)


def mask_expert_counts(chunks: Iterable[torch.nn.Module], kept: Tensor) -> None:
    """Zero the counts for expert biases of the running step unless ``kept``."""
    for router in routers(chunks):
        if router.enable_expert_bias:
            router.local_tokens_per_expert.mul_(kept)


_ROUTER_METHODS: Mapping[str, Callable[..., Tensor | None]] = {
    **{f"_apply_{kind}": partial(_balancing_loss, kind) for kind in _BALANCING},
    "apply_z_loss": _z_loss,
    "_apply_expert_bias": _count_for_bias,
}
"""Methods of Megatron's router and their replacements."""


def pass_sequence_ids(batch: MicroBatch, model: Upstream) -> Tensor | None:
    """Return ``GPTModel``'s ``padding_mask``, None without experts, and set the ids of MTP layers.

    Args:
        batch: Micro-batch of this context-parallel rank.
        model: A chunk, wrapped or not.
    """
    from megatron.core.utils import get_attr_wrapped_model

    config = model.config
    if not config.num_moe_experts:
        return None
    modules = get_attr_wrapped_model(model, "modules")() if config.mtp_num_layers else ()
    for depth, layer in enumerate(_mtp_layers(modules), 1):
        layer.mca_sequence_ids = _tensor_rank_share(batch.segments_at_depth(depth), config.sequence_parallel)
    cut = config.sequence_parallel and not get_attr_wrapped_model(model, "pre_process")
    return _tensor_rank_share(batch.segments_at_depth(), cut)


def _tensor_rank_share(numbers: Tensor, cut: bool) -> Tensor:
    """Return this tensor-parallel rank's tokens of ``[b, s]``."""
    return groups.sequence_parallel_shard(numbers, 1) if cut else numbers


def propagate_sequence_ids(chunk: torch.nn.Module) -> None:
    """Make the layers of ``chunk`` pass the ids of `pass_sequence_ids` to its routers."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    modules = list(chunk.modules())
    for module in modules:
        if isinstance(module, MoELayer):
            module.register_forward_pre_hook(_to_planes, with_kwargs=True)
    for layer in _mtp_layers(modules):
        if "padding_mask" in signature(layer._get_embeddings).parameters:
            layer._get_embeddings = partial(_embeddings_and_sequence_ids, layer, layer._get_embeddings)
        else:
            layer.forward = partial(_forward_with_sequence_ids, layer, layer.forward)


def mtp_router_depths(chunk: torch.nn.Module) -> dict[torch.nn.Module, int]:
    """Return the prediction depth of each router in the MTP layers of ``chunk``."""
    from megatron.core.transformer.moe.router import TopKRouter

    return {
        module: depth
        for depth, layer in enumerate(_mtp_layers(chunk.modules()), 1)
        for module in layer.modules()
        if isinstance(module, TopKRouter)
    }


def _mtp_layers(modules: Iterable[Upstream]) -> Iterator[Upstream]:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    return (module for module in modules if isinstance(module, MultiTokenPredictionLayer))


def _to_planes(
    module: Upstream, args: Upstream, options: dict[str, Upstream]
) -> tuple[Upstream, dict[str, Upstream]]:
    """Convert ids ``[b, s]`` to planes ``[b, s, planes]`` before an MoE layer."""
    tokens = options.get("padding_mask")
    if tokens is None:
        tokens = vars(module).get("mca_sequence_ids")
    if tokens is None or tokens.dtype == torch.bool:
        return args, options
    digits = torch.arange(_PLANES, device=tokens.device)
    planes = ((tokens + 1).unsqueeze(-1) >> digits) & 1
    return args, options | {"padding_mask": planes.bool()}


def decode_sequence_ids(mask: Tensor | None, logits: Tensor) -> Tensor:
    """Return the sequence id of each token that a router sees, -1 for padding: ``[tokens]``.

    Args:
        mask: Planes ``[s, b, planes]``; a plain mask ``[s, b]``; None: no padding, each row is a sequence.
        logits: ``[s, b, experts]``
    """
    if mask is not None and mask.dim() == 3:
        weights = 1 << torch.arange(mask.shape[-1], device=mask.device)
        return ((mask * weights).sum(-1) - 1).flatten()
    rows = torch.arange(logits.shape[1], device=logits.device).expand(logits.shape[:2])
    return (rows if mask is None else rows.masked_fill(mask, -1)).flatten()


def _embeddings_and_sequence_ids(
    layer: Upstream, plain: Upstream, *args: Upstream, **options: Upstream
) -> tuple[Upstream, ...]:
    """Call an MTP layer's ``_get_embeddings`` with the ids as its mask."""
    ids, positions, _, *rest = plain(*args, **(options | {"padding_mask": None}))
    return ids, positions, layer.__dict__.pop("mca_sequence_ids", None), *rest


def _forward_with_sequence_ids(
    layer: Upstream, plain: Upstream, *args: Upstream, **options: Upstream
) -> Upstream:
    """Run an MTP layer's forward; its recomputation keeps the ids of this micro-batch."""
    compute = type(layer)._proj_and_transformer_layer
    tokens = layer.__dict__.pop("mca_sequence_ids", None)
    layer._proj_and_transformer_layer = partial(_compute_with_sequence_ids, layer, compute, tokens)
    return plain(*args, **options)


def _compute_with_sequence_ids(
    layer: Upstream, compute: Upstream, tokens: Tensor, *args: Upstream, **options: Upstream
) -> Upstream:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    experts = [module for module in layer.modules() if isinstance(module, MoELayer)]
    for module in experts:
        vars(module)["mca_sequence_ids"] = tokens
    try:
        return compute(layer, *args, **options)
    finally:
        for module in experts:
            vars(module)["mca_sequence_ids"] = None
