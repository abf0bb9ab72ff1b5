"""Training on preferences in plain PyTorch on the Hugging Face model: what `DpoTrainer` must equal."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import logsigmoid
from torch.optim.lr_scheduler import LambdaLR

BETA, STEPS, PAIRS, RATE = 0.5, 2, 4, 2e-3


def pairs(count: int = PAIRS) -> Any:
    """Ragged pairs that share a prompt, which is no target."""
    from mca_train import PairDataset, TokenDataset

    draw = np.random.default_rng(11)
    rows = []
    for _ in range(count):
        prompt = draw.integers(0, 130, draw.integers(2, 8))
        for _ in range(2):
            answer = draw.integers(0, 130, draw.integers(2, 20))
            mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
            rows.append((np.concatenate([prompt, answer]), mask))
    return PairDataset(TokenDataset.from_samples(rows))


def log_probability(model: Any, item: Any, side: str) -> tuple[torch.Tensor, int]:
    """Return the log-probability of an answer, and the number of its tokens."""
    ids, labels = item[f"{side}_input_ids"], item[f"{side}_labels"][1:]
    found = model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    mask = labels != -100
    return found[mask].gather(1, labels[mask, None]).sum(), int(mask.sum())


def loss_of(kind: str) -> Callable[..., torch.Tensor]:
    """The loss of one pair from the papers' formulas: ``(c, r, c0, r0, tokens of c, of r)``."""

    def odds(mean: torch.Tensor) -> torch.Tensor:
        return torch.log(mean.exp() / (1 - mean.exp()))

    formulas: dict[str, Callable[..., torch.Tensor]] = {
        "sigmoid": lambda c, r, c0, r0, n, m: -logsigmoid(BETA * ((c - c0) - (r - r0))),
        "hinge": lambda c, r, c0, r0, n, m: torch.relu(1 - BETA * ((c - c0) - (r - r0))),
        "ipo": lambda c, r, c0, r0, n, m: (((c - c0) / n - (r - r0) / m) - 1 / (2 * BETA)) ** 2,
        "orpo": lambda c, r, c0, r0, n, m: -c / n - BETA * logsigmoid(odds(c / n) - odds(r / m)),
    }
    return formulas[kind]


def train_plain(model: Any, reference: Any, kind: str) -> dict[str, list[float]]:
    """Losses and gradient norms of ``STEPS`` of AdamW over all pairs, rates falling to zero."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, RATE, weight_decay=0.0)
    schedule = LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    found: dict[str, list[float]] = {"loss": [], "grad_norm": [], "rewards/accuracies": []}
    for _ in range(STEPS):
        losses, right = [], []
        for item in pairs():
            (c, n), (r, m) = (log_probability(model, item, side) for side in ("chosen", "rejected"))
            with torch.no_grad(), reference() as frozen:
                c0, r0 = (log_probability(frozen, item, side)[0] for side in ("chosen", "rejected"))
            losses.append(loss_of(kind)(c, r, c0, r0, n, m))
            if kind == "orpo":
                c0, r0, c, r = c0 * 0, r0 * 0, c / n, r / m
            right.append(float((c - c0) - (r - r0) > 0))
        optimizer.zero_grad()
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1e9)
        optimizer.step()
        schedule.step()
        found["loss"].append(float(loss.detach()))
        found["grad_norm"].append(float(norm))
        found["rewards/accuracies"].append(sum(right) / len(right))
    return found


def hf_model(checkpoint: Path) -> Any:
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
