"""Losses of sequence-classification heads: reward models, classification, regression.

A sequence's score is that of its last token, as in Hugging Face's ``...ForSequenceClassification``. The loss of a step
is the mean over all samples of the global batch:

    reward        -log sigmoid(chosen - rejected - margin) + coefficient (chosen + rejected)^2
    single label  cross entropy
    multi label   binary cross entropy, a mean over the labels
    regression    squared error, a mean over the labels
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from mca_train import groups
from mca_train.batching.micro_batch import MicroBatch
from mca_train.losses.options import ProblemType


def sequence_scores(output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return scores of every sequence ``[sequences, labels]`` and a mask ``[sequences]``, over all context ranks.

    Args:
        output: ``[b, s, labels]`` of each token.
        batch: Micro-batch with segment ids.
    """
    is_last = (batch.tokens_remaining == 0).flatten().float()
    segments = batch.segments.flatten()
    zeros = torch.zeros(batch.num_segments, output.shape[-1], dtype=torch.float32, device=output.device)
    scores = zeros.index_add(0, segments, output.float().flatten(0, 1) * is_last[:, None])
    real = zeros[:, 0].index_add(0, segments, is_last)
    return groups.sum_over_context(scores), groups.sum_over_context(real)


def reward_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float, centering: float) -> Tensor:
    """Return the loss of each pair."""
    return centering * (chosen + rejected) ** 2 - functional.logsigmoid(chosen - rejected - margin)


def _single_label(scores: Tensor, values: Tensor) -> Tensor:
    return functional.cross_entropy(scores, values[:, 0].long(), reduction="none")


def _multi_label(scores: Tensor, values: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(scores, values, reduction="none").mean(1)


def _squared_error(scores: Tensor, values: Tensor) -> Tensor:
    return ((scores - values) ** 2).mean(1)


LOSSES: dict[ProblemType, Callable[[Tensor, Tensor], Tensor]] = {
    "single_label_classification": _single_label,
    "multi_label_classification": _multi_label,
    "regression": _squared_error,
}
"""Loss of each sequence, from its scores and its values."""


METRICS: dict[ProblemType, Callable[[Tensor, Tensor], Tensor]] = {
    "single_label_classification": lambda s, v: (s.argmax(1) == v[:, 0]).float(),
    "multi_label_classification": lambda s, v: ((s > 0) == (v > 0)).float().mean(1),
    "regression": lambda s, v: (s - v).abs().mean(1),
}
"""Logged metric of each sequence; `options` has its name."""
