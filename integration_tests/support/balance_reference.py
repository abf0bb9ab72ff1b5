"""Losses beside the cross entropy by their definitions, in plain PyTorch on transformers' layers, one sample at a time.

A sample alone has no padding, no neighbours in a row and no ranks, so this is what every layout has to compute.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from net.balance import DEFAULT_BIAS_RATE as BIAS_RATE
from net.balance import Routers
from prediction import SCALE, WithPrediction, deepseek_with_prediction

COEFFICIENTS = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.02}
LENGTHS = (4, 8, 12, 8, 3, 13, 5, 11)  # two micro-batches of four, each 32 tokens
PER_MICRO_BATCH = 4
Sample = tuple[Any, Any]


def balanced_model() -> WithPrediction:
    """DeepSeek V3 of a dense layer and two with experts, and an MTP layer: two stages have routers."""
    return deepseek_with_prediction(num_hidden_layers=3)


def samples() -> list[Sample]:
    """Tokens and which of them are targets."""
    draw = np.random.default_rng(1)
    return [(draw.integers(1, 64, length), np.arange(length) >= length // 3) for length in LENGTHS]


def expected(folder: Path, kind: str) -> Path:
    """A checkpoint with the gradients of the whole loss in the place of weights, and routers' biases as they move.

    Args:
        folder: For it.
        kind: Of balancing loss; ``none``: no loss of experts at all.
    """
    model = balanced_model()
    routers = Routers(model, model.main.config, model.layers)
    sums, routed = torch.zeros(2), []
    for batch in batched(samples()):
        with routers.watched() as found:
            sums = sums + torch.stack([_entropies(model, *sample) for sample in batch]).sum(0)
        routed.append(found)
    targets = targets_of()
    loss = sums[0] / targets[0] + SCALE * sums[1] / targets[1]
    if kind != "none":
        loss = loss + COEFFICIENTS["moe_aux_loss_coeff"] * routers.loss(kind, routed)
        loss = loss + COEFFICIENTS["moe_z_loss_coeff"] * routers.z_loss(routed)
    loss.backward()
    return _save(model, folder, lambda: routers.move_biases(BIAS_RATE, routed))


def targets_of() -> list[int]:
    """Count the targets of the model and of the MTP layer."""
    return [sum(int(mask[first:].sum()) for _, mask in samples()) for first in (1, 2)]


@cache
@torch.no_grad()
def prediction_loss() -> float:
    """Return the loss of the MTP layer before the first step."""
    model = balanced_model()
    return float(sum(_entropies(model, *sample)[1] for sample in samples())) / targets_of()[1]


def batched(every: list[Sample]) -> list[list[Sample]]:
    """The samples of each micro-batch."""
    return [every[first : first + PER_MICRO_BATCH] for first in range(0, len(every), PER_MICRO_BATCH)]


def _entropies(model: WithPrediction, tokens: Any, mask: Any) -> Tensor:
    """Sums over the targets of the model and of the MTP layer."""
    ids = torch.as_tensor(tokens)[None]
    sums = []
    for ahead, logits in enumerate(model.logits(ids), 1):
        losses = cross_entropy(logits[0, :-ahead], ids[0, ahead:], reduction="none")
        sums.append((losses * torch.as_tensor(mask[ahead:])).sum())
    return torch.stack(sums)


@torch.no_grad()
def _save(model: WithPrediction, folder: Path, move_biases: Callable[[], None]) -> Path:
    for parameter in model.parameters():
        parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    move_biases()
    return model.save(folder)
