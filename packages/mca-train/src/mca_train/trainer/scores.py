"""``RewardTrainer`` and ``ClassificationTrainer`` train models with a sequence-classification head.

The samples' ``values`` are the targets. A sequence's score is that of its last token, as in Hugging Face's
``...ForSequenceClassification``. The loss of a step is the mean over all samples of the global batch:

    reward        -log sigmoid(chosen - rejected - margin) + coefficient (chosen + rejected)^2
    single label  cross entropy
    multi label   binary cross entropy, a mean over the labels
    regression    squared error, a mean over the labels
"""

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Unpack

import torch
from torch import Tensor
from torch.nn import functional

from mca_config.errors import McaError
from mca_train import groups
from mca_train.batching.collate import CollatorFormat
from mca_train.batching.micro_batch import MicroBatch
from mca_train.losses.options import SCORE_METRICS, ProblemType
from mca_train.losses.token_loss import sequence_loss
from mca_train.trainer.base import TrainerOptions
from mca_train.trainer.loaders import Loaders
from mca_train.trainer.reference import warn_trl_differences
from mca_train.trainer.rules import RULES, classification, one_label
from mca_train.trainer.trainer import McaTrainer


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


LOSSES: dict[ProblemType, Callable[[Tensor, Tensor], Tensor]] = {
    "single_label_classification": lambda s, v: functional.cross_entropy(s, v[:, 0].long(), reduction="none"),
    "multi_label_classification": lambda s, v: functional.binary_cross_entropy_with_logits(
        s, v, reduction="none"
    ).mean(1),
    "regression": lambda s, v: ((s - v) ** 2).mean(1),
}
"""Loss of each sequence, from its scores and its values."""


METRICS: dict[ProblemType, Callable[[Tensor, Tensor], Tensor]] = {
    "single_label_classification": lambda s, v: (s.argmax(1) == v[:, 0]).float(),
    "multi_label_classification": lambda s, v: ((s > 0) == (v > 0)).float().mean(1),
    "regression": lambda s, v: (s - v).abs().mean(1),
}
"""Logged metric of each sequence; `options` has its name."""


class ScoreTrainer(McaTrainer):
    """Base of the trainers for sequence-classification heads.

    Args:
        options: Options of `McaTrainer`; the model has a sequence-classification head.
    """

    wants_logits = True
    _rules = (*RULES, classification)


class RewardTrainer(ScoreTrainer):
    """Trainer for a reward model on preference pairs, whose ``values`` are the margins, if known.

    Logs ``accuracy``, ``margin``, ``mean_reward``, ``min_reward`` and ``max_reward`` in addition to the loss, in
    evaluation too.

    Args:
        center_rewards_coefficient: Weight of the squared sum of a pair's rewards, which keeps them around 0.
        options: Options of `McaTrainer`.
    """

    run_kind = "reward"
    _rules = (*ScoreTrainer._rules, one_label)
    metric_names = ("accuracy", "margin", "mean_reward")
    metric_extremes = MappingProxyType({"min_reward": "smallest", "max_reward": "largest"})

    def __init__(
        self, *, center_rewards_coefficient: float | None = None, **options: Unpack[TrainerOptions]
    ) -> None:
        super().__init__(**options)
        warn_trl_differences(self.model)
        self._centering = center_rewards_coefficient or 0.0

    def compute_loss(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the loss sum over this micro-batch's pairs and their count."""
        scores, counts = sequence_scores(output, batch)
        both = len(scores) // 2 * 2  # a pack may end in an empty sequence
        chosen, rejected = scores[0:both:2, 0], scores[1:both:2, 0]
        real = counts[0:both:2] * counts[1:both:2]
        margin = 0.0 if batch.values is None else batch.values[0:both:2, 0].float()
        losses = reward_loss(chosen, rejected, margin, self._centering)
        means = {
            "accuracy": (chosen > rejected).float(),
            "margin": chosen - rejected,
            "mean_reward": (chosen + rejected) / 2,
        }
        self._add_means(means, real)
        self.metrics.add_extremes(torch.stack([chosen, rejected]), real.expand(2, -1))
        return sequence_loss(losses, real, self.ranks)


class ClassificationTrainer(ScoreTrainer):
    """Trainer for sequences whose ``values`` are a class, 0 or 1 for each label, or numbers.

    Logs ``accuracy``, or ``mean_absolute_error`` for regression, in addition to the loss, in evaluation too.

    Args:
        problem_type: Hugging Face's name of the problem.
        options: Options of `McaTrainer`.
    """

    run_kind = "classify"

    def __init__(
        self, *, problem_type: ProblemType = "single_label_classification", **options: Unpack[TrainerOptions]
    ) -> None:
        self.metric_names = (SCORE_METRICS[problem_type],)
        self._problem_type = problem_type
        super().__init__(**options)

    def _new_loaders(
        self, pad_token_id: int, pack_length: int | None, collator_format: CollatorFormat
    ) -> Loaders:
        made = super()._new_loaders(pad_token_id, pack_length, collator_format)
        has_classes = self._problem_type == "single_label_classification"
        return replace(made, num_classes=self.model.config.head.num_labels if has_classes else None)

    def compute_loss(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the loss sum over this micro-batch's sequences and their count."""
        if batch.values is None:
            raise McaError("a sample of the dataset has no 'values'; expected its class, labels or numbers")
        scores, real = sequence_scores(output, batch)
        values = batch.values.float()
        name, metric = SCORE_METRICS[self._problem_type], METRICS[self._problem_type]
        self._add_means({name: metric(scores, values)}, real)
        return sequence_loss(LOSSES[self._problem_type](scores, values), real, self.ranks)
