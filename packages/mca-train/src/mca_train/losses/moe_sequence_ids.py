"""Sequence ids for MoE routers: the sequence of each token, -1 for padding.

Megatron passes only a padding mask ``[b, s]`` through stages and recomputation to the MoE layer, which converts it to
booleans. Sequence ids therefore replace the mask, and pass the MoE layer as boolean planes, the binary digits of the
id. Two cases that Megatron leaves open:

- Pipeline stages after the first do not split the mask for sequence parallelism.
- MTP layers have no mask (0.16) or a mask shifted across the split (0.19). Here their mask covers the tokens that have
  enough tokens of their sequence after them, because the values at other positions differ between padded and
  packed batches.
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
"""Binary digits of a sequence id; the row of a micro-batch has less than 2^16 sequences."""


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
