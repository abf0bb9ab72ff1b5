"""TRL's losses of pairs and ours on the same log-probabilities, without a model."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

PAIRS, LENGTH, BETA = 6, 9, 0.3
FORMULAS: dict[str, float] = {
    "sigmoid": 0.0,
    "hinge": 0.0,
    "ipo": 0.0,
    "robust": 0.1,
    "exo_pair": 0.001,
    "nca_pair": 0.0,
    "bco_pair": 0.0,
    "sppo_hard": 0.0,
    "apo_zero": 0.0,
    "apo_down": 0.0,
    "discopop": 0.0,
    "sigmoid_norm": 0.0,
}
"""Losses that both have, and their label smoothing."""
Found = dict[str, tuple[float, Tensor]]
"""The loss of each, and the gradient of every token's log-probability."""


def _given() -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the answers' tokens ``[2 * pairs, length]``, which count, and the reference's sums."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(2, LENGTH, (2 * PAIRS, 1), generator=generator)
    mask = torch.arange(LENGTH) < lengths
    log_probs = -4 * torch.rand(2 * PAIRS, LENGTH, generator=generator) * mask
    reference = log_probs.sum(1) + 3 * torch.randn(2 * PAIRS, generator=generator)
    return log_probs, mask, reference


def by_trl(trainer: Any) -> Found:
    """By ``trainer``, a DPOTrainer whose model is not asked."""
    found = {}
    for kind, smoothing in FORMULAS.items():
        log_probs, mask, reference = _given()
        log_probs.requires_grad_()
        trainer.loss_types, trainer.loss_weights, trainer.beta = [kind], [1.0], BETA
        trainer.label_smoothing, trainer.precompute_ref_logps = smoothing, True
        chosen, rejected = reference.chunk(2)
        counts = torch.nn.functional.pad(mask.int(), (1, 0))  # a token of the prompt stands before them
        inputs = {"input_ids": counts, "attention_mask": counts, "completion_mask": counts}
        inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        shown = dict.fromkeys(("entropy", "mean_logits"), torch.zeros(log_probs.shape)) | {"is_top1": mask}
        outputs = SimpleNamespace(log_probs=log_probs, **shown)
        loss = trainer._compute_loss(lambda outputs=outputs, **_: outputs, inputs, False)
        loss.backward()
        found[kind] = (float(loss.detach()), log_probs.grad)
    return found


def by_mca() -> Found:
    """By `PreferenceLoss`."""
    from mca_train.losses.preference import PairLogps, PreferenceLoss

    found: Found = {}
    for kind, smoothing in FORMULAS.items():
        log_probs, mask, reference = _given()
        log_probs.requires_grad_()
        sums, tokens, known = (
            PairLogps(*each.chunk(2)) for each in (log_probs.sum(1), mask.sum(1), reference)
        )
        loss = PreferenceLoss(kind=kind, beta=BETA, label_smoothing=smoothing)(sums, tokens, known).mean()
        loss.backward()
        assert log_probs.grad is not None
        found[kind] = (float(loss.detach()), log_probs.grad)
    return found
