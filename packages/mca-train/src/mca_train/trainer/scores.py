"""``RewardTrainer`` and ``ClassificationTrainer`` train models with a head for sequences.

The losses are in `losses.scores`; samples say in ``values`` what is right.
"""

from types import MappingProxyType
from typing import Unpack

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_train.batching.micro_batch import MicroBatch
from mca_train.losses.preference import model_problems
from mca_train.losses.scores import LOSSES, METRICS, ProblemType, key_problems, reward_loss, sequence_scores
from mca_train.losses.token_loss import sequence_loss
from mca_train.trainer.base import TrainerOptions
from mca_train.trainer.reference import warn_trl_differences
from mca_train.trainer.trainer import McaTrainer


class ScoreTrainer(McaTrainer):
    """What trainers on scores of sequences share.

    Args:
        options: As of `McaTrainer`; the model has a head for sequences.
    """

    wants_logits = True

    def __init__(self, **options: Unpack[TrainerOptions]) -> None:
        super().__init__(**options)
        if self.model.config.head != "sequence_classification":
            raise McaError(
                f"{type(self).__name__} needs a model that scores sequences, not {self.model.config.head}; make it "
                "with AutoModel.from_pretrained(..., head=Head(...))"
            )
        for problem in (*key_problems(self.args), *model_problems(self.model.megatron)):
            raise McaError(problem)

    def _add_means(self, values: dict[str, Tensor], real: Tensor) -> None:
        ranks = self.ranks.layout.cp
        sums = {name: (value.detach() * real).sum() / ranks for name, value in values.items()}
        self.metrics.add(sums, real.sum() / ranks)


class RewardTrainer(ScoreTrainer):
    """Trains a reward model on preference pairs, whose ``values`` are by how much the chosen one is better, if known.

    Logs ``accuracy``, ``margin``, ``mean_reward``, ``min_reward`` and ``max_reward`` beside the loss, in evaluation
    too.

    Args:
        center_rewards_coefficient: Weight of the squared sum of a pair's rewards, which keeps them around 0.
        options: As of `McaTrainer`.
    """

    run_kind = "reward"
    metric_names = ("accuracy", "margin", "mean_reward")
    metric_extremes = MappingProxyType({"min_reward": "smallest", "max_reward": "largest"})

    def __init__(
        self, *, center_rewards_coefficient: float | None = None, **options: Unpack[TrainerOptions]
    ) -> None:
        super().__init__(**options)
        if self.model.config.num_labels != 1:
            raise McaError(f"a reward model has one label, this one {self.model.config.num_labels}")
        warn_trl_differences(self.model)
        self._centering = center_rewards_coefficient or 0.0

    def compute_loss(self, output: Tensor, batch: MicroBatch, **_: object) -> tuple[Tensor, Tensor]:
        """The sum over this micro-batch's pairs, and their number."""
        scores, counts = sequence_scores(output, batch)
        both = len(scores) // 2 * 2  # a pack may end in a sequence of nothing
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
    """Trains on sequences whose ``values`` are a class, 0 or 1 for each label, or numbers.

    Logs ``accuracy`` beside the loss, of numbers ``mean_absolute_error``, in evaluation too.

    Args:
        problem_type: Which of these.
        options: As of `McaTrainer`.
    """

    run_kind = "classify"

    def __init__(
        self,
        *,
        problem_type: ProblemType = "single_label_classification",
        **options: Unpack[TrainerOptions],
    ) -> None:
        self.metric_names = (METRICS[problem_type][0],)
        super().__init__(**options)
        self._problem_type = problem_type

    def compute_loss(self, output: Tensor, batch: MicroBatch, **_: object) -> tuple[Tensor, Tensor]:
        """The sum over this micro-batch's sequences, and their number."""
        if batch.values is None:
            raise McaError("a sample of the dataset has no 'values'; expected its class, labels or numbers")
        scores, real = sequence_scores(output, batch)
        values = batch.values.float()
        name, metric = METRICS[self._problem_type]
        self._add_means({name: metric(scores, values)}, real)
        return sequence_loss(LOSSES[self._problem_type](scores, values), real, self.ranks)
