"""Tells every router of experts which sequence each of its tokens belongs to, and which tokens are padding.

Megatron takes a mask of padding, ``[b, s]``, and no more. It carries it through stages and recomputation to the
experts' layer, which makes booleans of it. So the numbers of the sequences travel in the mask's place, and as planes
of booleans, the digits of the number, through that layer. What Megatron leaves undone:

- pipeline stages behind the first do not cut the mask for sequence parallelism;
- prediction layers have none (0.16), or one that is shifted over the cut (0.19). Theirs is of the tokens that have as
  many tokens of their own sequence after them as the layer looks ahead: what stands in for the others is not the
  same padded and packed.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from inspect import signature

import torch
from torch import Tensor

from mca_train import groups
from mca_train.batching.micro_batch import MicroBatch
from mca_train.types import Upstream

_PLANES = 16
"""Digits of a sequence's number; the row of a micro-batch has less than 2^16 of them."""


def hand_tokens(batch: MicroBatch, model: Upstream) -> Tensor | None:
    """What ``GPTModel`` takes as ``padding_mask``, None without experts; prediction layers get theirs here.

    Args:
        batch: Of this context-parallel rank.
        model: A chunk, wrapped or not.
    """
    from megatron.core.utils import get_attr_wrapped_model

    config = model.config
    if not config.num_moe_experts:
        return None
    modules = get_attr_wrapped_model(model, "modules")() if config.mtp_num_layers else ()
    for depth, layer in enumerate(_prediction_layers(modules), 1):
        layer.mca_tokens = _own(batch.segments_at_depth(depth), config.sequence_parallel)
    cut = config.sequence_parallel and not get_attr_wrapped_model(model, "pre_process")
    return _own(batch.segments_at_depth(), cut)


def _own(numbers: Tensor, cut: bool) -> Tensor:
    """This tensor-parallel rank's tokens of ``[b, s]``."""
    return groups.own_tensor_share(numbers, 1) if cut else numbers


def carry_tokens(chunk: torch.nn.Module) -> None:
    """Has the layers of ``chunk`` bring to its routers what `hand_tokens` gives."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    modules = list(chunk.modules())
    for module in modules:
        if isinstance(module, MoELayer):
            module.register_forward_pre_hook(_to_planes, with_kwargs=True)
    for layer in _prediction_layers(modules):
        if "padding_mask" in signature(layer._get_embeddings).parameters:
            layer._get_embeddings = partial(_embeddings_and_tokens, layer, layer._get_embeddings)
        else:
            layer.forward = partial(_forward_with_tokens, layer, layer.forward)


def prediction_routers(chunk: torch.nn.Module) -> dict[torch.nn.Module, int]:
    """How far the layers of ``chunk`` that look further ahead than one token do so, by their routers."""
    from megatron.core.transformer.moe.router import TopKRouter

    return {
        module: depth
        for depth, layer in enumerate(_prediction_layers(chunk.modules()), 1)
        for module in layer.modules()
        if isinstance(module, TopKRouter)
    }


def _prediction_layers(modules: Iterable[Upstream]) -> Iterator[Upstream]:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    return (module for module in modules if isinstance(module, MultiTokenPredictionLayer))


def _to_planes(
    module: Upstream, args: Upstream, options: dict[str, Upstream]
) -> tuple[Upstream, dict[str, Upstream]]:
    """Before an experts' layer: numbers ``[b, s]`` to planes ``[b, s, planes]``."""
    tokens = options.get("padding_mask")
    if tokens is None:
        tokens = vars(module).get("mca_tokens")
    if tokens is None or tokens.dtype == torch.bool:
        return args, options
    digits = torch.arange(_PLANES, device=tokens.device)
    planes = ((tokens + 1).unsqueeze(-1) >> digits) & 1
    return args, options | {"padding_mask": planes.bool()}


def numbers_of(mask: Tensor | None, logits: Tensor) -> Tensor:
    """The sequence of each token that a router sees, -1 for padding: ``[tokens]``.

    Args:
        mask: Planes ``[s, b, planes]``; a plain mask ``[s, b]``; None: all count, each row is a sequence.
        logits: ``[s, b, experts]``
    """
    if mask is not None and mask.dim() == 3:
        weights = 1 << torch.arange(mask.shape[-1], device=mask.device)
        return ((mask * weights).sum(-1) - 1).flatten()
    rows = torch.arange(logits.shape[1], device=logits.device).expand(logits.shape[:2])
    return (rows if mask is None else rows.masked_fill(mask, -1)).flatten()


def _embeddings_and_tokens(
    layer: Upstream, plain: Upstream, *args: Upstream, **options: Upstream
) -> tuple[Upstream, ...]:
    """A prediction layer's ``_get_embeddings``, whose third result is the mask."""
    ids, positions, _, *rest = plain(*args, **(options | {"padding_mask": None}))
    return ids, positions, layer.__dict__.pop("mca_tokens", None), *rest


def _forward_with_tokens(layer: Upstream, plain: Upstream, *args: Upstream, **options: Upstream) -> Upstream:
    """A prediction layer's forward; what it recomputes in the backward pass still has this micro-batch's tokens."""
    compute = type(layer)._proj_and_transformer_layer
    tokens = layer.__dict__.pop("mca_tokens", None)
    layer._proj_and_transformer_layer = partial(_with_tokens, layer, compute, tokens)
    return plain(*args, **options)


def _with_tokens(
    layer: Upstream, compute: Upstream, tokens: Tensor, *args: Upstream, **options: Upstream
) -> Upstream:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    experts = [module for module in layer.modules() if isinstance(module, MoELayer)]
    for module in experts:
        vars(module)["mca_tokens"] = tokens
    try:
        return compute(layer, *args, **options)
    finally:
        for module in experts:
            vars(module)["mca_tokens"] = None
