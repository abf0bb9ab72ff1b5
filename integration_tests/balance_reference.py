"""Losses beside the cross entropy by their definitions, in plain PyTorch on transformers' layers, one sample at a time.

A sample alone has no padding, no neighbours in a row and no ranks, so this is what every layout has to compute.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from test_mtp import SCALE, WithPrediction

COEFFICIENTS = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.02}
BIAS_RATE = 1e-3
LENGTHS = (4, 8, 12, 8, 3, 13, 5, 11)  # two micro-batches of four, each 32 tokens
PER_MICRO_BATCH = 4
TOP_K = 2
Sample = tuple[Any, Any]


def samples() -> list[Sample]:
    """Tokens and which of them are targets."""
    draw = np.random.default_rng(1)
    return [(draw.integers(1, 64, length), np.arange(length) >= length // 3) for length in LENGTHS]


@dataclass
class Routed:
    """What one router gave one sample's tokens.

    Args:
        logits: ``[tokens, experts]`` of the tokens that count.
        sent: Tokens that each expert got.
    """

    logits: Tensor
    sent: Tensor


@dataclass
class Found:
    """Of all samples, by router."""

    routed: list[list[Routed]] = field(default_factory=list)

    def losses(self, kind: str) -> Iterator[Tensor]:
        """The losses of each router's layer."""
        edges = [0, *accumulate(_group_sizes(kind))]
        for of_layer in self.routed:
            logits = [each.logits for each in of_layer]
            tokens = sum(len(x) for x in logits)
            parts = [torch.cat(logits[a:b]) for a, b in pairwise(edges)]
            yield sum(len(part) / tokens * balance(part) for part in parts)  # type: ignore[misc]


def _group_sizes(kind: str) -> list[int]:
    size = {"aux_loss": PER_MICRO_BATCH, "seq_aux_loss": 1, "global_aux_loss": len(LENGTHS)}[kind]
    return [size] * (len(LENGTHS) // size)


def balance(logits: Tensor) -> Tensor:
    """The balancing loss of ``[tokens, experts]``."""
    scores = torch.sigmoid(logits)
    scores = scores / scores.sum(-1, keepdim=True)
    sent = torch.zeros_like(scores).scatter_(1, scores.topk(TOP_K, -1).indices, 1.0)
    return scores.shape[1] / TOP_K * (sent.mean(0) * scores.mean(0)).sum()


@contextmanager
def _routers(model: WithPrediction, found: Found) -> Iterator[None]:
    """Collects what the routers give; the prediction layer's last token has no next one and does not count."""
    named = [(name, module) for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = []
    for name, gate in named:
        of_layer: list[Routed] = []
        found.routed.append(of_layer)
        ahead = int(name.startswith("layer."))

        def record(module: Any, args: Any, out: Any, ahead: int = ahead, of_layer: Any = of_layer) -> None:
            count = len(out[0]) - ahead
            sent = torch.bincount(out[2][:count].flatten(), minlength=out[0].shape[1])
            of_layer.append(Routed(out[0][:count], sent))

        hooks.append(gate.register_forward_hook(record))
    yield
    for hook in hooks:
        hook.remove()


def expected(folder: Path, kind: str, *, predicts: bool) -> Path:
    """A checkpoint with the gradients of the whole loss in the place of weights, and routers' biases as they move.

    Args:
        folder: For it.
        kind: Of balancing loss; ``none``: no loss of experts at all.
        predicts: With the prediction layer.
    """
    model, found = WithPrediction(), Found()
    with _routers(model, found):
        sums = torch.stack([_entropies(model, *sample, predicts=predicts) for sample in samples()]).sum(0)
    if not predicts:
        found.routed.pop()
    targets = [sum(int(mask[first:].sum()) for _, mask in samples()) for first in (1, 2)]
    loss = sums[0] / targets[0] + SCALE * sums[1] / targets[1]
    if kind != "none":
        loss = loss + COEFFICIENTS["moe_aux_loss_coeff"] * sum(found.losses(kind))
        every = [torch.cat([each.logits for each in of_layer]) for of_layer in found.routed]
        squares = [logits.logsumexp(-1).square().mean() for logits in every]
        loss = loss + COEFFICIENTS["moe_z_loss_coeff"] * sum(squares)
    loss.backward()
    return _save(model, found, folder, predicts=predicts)


def _entropies(model: WithPrediction, tokens: Any, mask: Any, *, predicts: bool) -> Tensor:
    """Sums over the targets of the model and of the prediction layer."""
    ids = torch.as_tensor(tokens)[None]
    sums = []
    for ahead, logits in enumerate(model.both_logits(ids) if predicts else model.both_logits(ids)[:1], 1):
        losses = cross_entropy(logits[0, :-ahead], ids[0, ahead:], reduction="none")
        sums.append((losses * torch.as_tensor(mask[ahead:])).sum())
    return torch.stack(sums if predicts else [*sums, torch.zeros(())])


@torch.no_grad()
def _save(model: WithPrediction, found: Found, folder: Path, *, predicts: bool) -> Path:
    for parameter in model.parameters():
        parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    for gate, of_layer in zip(gates, found.routed, strict=False):
        load = torch.stack([each.sent for each in of_layer]).sum(0).float()
        gate.e_score_correction_bias += BIAS_RATE * torch.sign(load.mean() - load)
    if predicts:
        return model.save(folder)
    model.main.save_pretrained(folder)
    return folder
