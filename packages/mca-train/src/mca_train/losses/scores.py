"""Training on scores of whole sequences: rewards of pairs, classes, numbers.

A sequence's score is that of its last token, as Hugging Face's ``...ForSequenceClassification`` has it. The loss of a
step is the mean over all samples of the global batch:

    reward        -log sigmoid(chosen - rejected - margin) + coefficient (chosen + rejected)^2
    single label  cross entropy
    multi label   binary cross entropy, a mean over the labels
    regression    squared error, a mean over the labels
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional

from mca_train import groups
from mca_train.batching.micro_batch import MicroBatch

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
"""Hugging Face's names, as in ``config.json``."""


def sequence_scores(output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Scores of every sequence ``[sequences, labels]``, and which count ``[sequences]``, over all context ranks.

    Args:
        output: ``[b, s, labels]`` of each token.
        batch: Whose segments are the sequences.
    """
    is_last = (batch.tokens_remaining == 0).flatten().float()
    segments = batch.segments.flatten()
    zeros = torch.zeros(batch.num_segments, output.shape[-1], dtype=torch.float32, device=output.device)
    found = zeros.index_add(0, segments, output.float().flatten(0, 1) * is_last[:, None])
    real = zeros[:, 0].index_add(0, segments, is_last)
    return groups.sum_over_context(found), groups.sum_over_context(real)


def reward_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float, centering: float) -> Tensor:
    """Of each pair."""
    loss = -functional.logsigmoid(chosen - rejected - margin)
    return loss + centering * (chosen + rejected) ** 2 if centering else loss


def _of_classes(scores: Tensor, values: Tensor) -> Tensor:
    return functional.cross_entropy(scores, values[:, 0].long(), reduction="none")


def _of_labels(scores: Tensor, values: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(scores, values, reduction="none").mean(1)


def _of_numbers(scores: Tensor, values: Tensor) -> Tensor:
    return ((scores - values) ** 2).mean(1)


LOSSES: dict[ProblemType, Callable[[Tensor, Tensor], Tensor]] = {
    "single_label_classification": _of_classes,
    "multi_label_classification": _of_labels,
    "regression": _of_numbers,
}
"""Of each sequence, from its scores and its values."""


METRICS: dict[ProblemType, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "single_label_classification": ("accuracy", lambda s, v: (s.argmax(1) == v[:, 0]).float()),
    "multi_label_classification": ("accuracy", lambda s, v: ((s > 0) == (v > 0)).float().mean(1)),
    "regression": ("mean_absolute_error", lambda s, v: (s - v).abs().mean(1)),
}
"""What is logged beside the loss."""


def key_problems(training: "TrainingArguments") -> Iterator[str]:
    """Keys of the arguments that say nothing of scores."""
    if training.label_smoothing_factor:
        yield "label_smoothing_factor is not for scores; remove it"
    if training.loss_chunk_size:
        yield "loss_chunk_size does nothing where there are no logits of a vocabulary; remove it"
