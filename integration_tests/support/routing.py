"""Experts of each token, by transformers and by the factory on any layout."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Experts = dict[int, Tensor]
"""By decoder layer (from 0): ``[batch, seq, experts]``, whether a token is sent to an expert."""


@contextmanager
def recorded_experts(model: Any, batch: int) -> Iterator[Experts]:
    """Record the inputs of the experts of a transformers model in one forward pass, by layer."""
    found: Experts = {}
    halves = 2 if hasattr(model.config, "zero_expert_num") else 1  # a layer is two of ours

    def record(layer: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...]) -> None:
            chosen: Tensor = args[1]  # [batch * seq, topk]
            count = getattr(module, "total_experts", next(module.parameters()).shape[0])
            sent = torch.zeros(len(chosen), count, dtype=torch.bool).scatter_(1, chosen, True)
            found[layer * halves] = sent.unflatten(0, (batch, -1))

        return hook

    def record_scores(layer: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            found[layer] = (output[0] > 0).unflatten(0, (batch, -1))

        return hook

    named = [(name.split("."), module) for name, module in model.named_modules()]
    hooks = [
        module.register_forward_pre_hook(record(int(name[2])))
        for name, module in named
        if type(module).__name__.endswith("Experts") and not hasattr(module, "expert_dim")
    ]
    hooks += [  # Llama 4's experts are given all tokens, most of them times 0
        module.register_forward_hook(record_scores(int(name[2])))
        for name, module in named
        if type(module).__name__ == "Llama4Router"
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class Compared:
    """The factory against transformers on one rank.

    Args:
        difference: Largest absolute difference of the logits.
        misrouted: Tokens of this rank, in layers of this rank, that are sent to other experts.
        routed: Tokens of this rank, in layers of this rank, that were compared.
    """

    difference: float
    misrouted: int = 0
    routed: int = 0
    layers: list[int] = field(default_factory=list)

    def problem(self) -> str | None:
        """Return the problem with the routing; None: there is none."""
        if self.misrouted:
            return (
                f"{self.misrouted} of {self.routed} tokens are sent to other experts, in layers {self.layers}"
            )
        return None


def compare(models: Any, reference: Any) -> Compared:
    """Logits and routing of ``models`` against ``reference``; on every rank."""
    maps: dict[int, list[Tensor]] = {}
    hooks = []
    for layer in (layer for chunk in models.chunks for layer in chunk.decoder.layers):
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            record = maps.setdefault(layer.layer_number - 1, [])
            hooks.append(router.register_forward_hook(lambda m, a, out, record=record: record.append(out[1])))
    logits = models.logits(reference.input_ids)
    for hook in hooks:
        hook.remove()
    compared = Compared(float((logits.cpu() - reference.logits).abs().max()))
    for layer, records in maps.items():
        expected = own_tokens(models, reference.experts[layer])
        rows = [each.cpu().bool().view(len(expected), -1, expected.shape[-1]) for each in records]
        wrong = (torch.cat(rows, 1)[:, : expected.shape[1]] != expected).any(-1)
        compared.routed += wrong.numel()
        compared.misrouted += int(wrong.sum())
        compared.layers += [layer] if wrong.any() else []
    return compared


def own_tokens(models: Any, x: Tensor) -> Tensor:
    """Return the part of ``[batch, seq, ...]`` that a router of this rank sees, as ``[seq, batch, ...]``."""
    from mca_models.megatron.distributed import parallel
    from mca_models.megatron.layers.zigzag import take_rank_tokens

    context, tensor = parallel.context_group(), parallel.tensor_group()
    x = take_rank_tokens(x, 1, context.rank(), context.size())
    if models.megatron.sequence_parallel:
        x = x.chunk(tensor.size(), 1)[tensor.rank()]
    return x.transpose(0, 1)
