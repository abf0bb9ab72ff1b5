"""``mca-train reward``: a reward model on preference pairs, with the Bradley-Terry loss (`trainer.scores`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from mca_config.errors import McaError
from mca_train.config.arguments import DataArguments, RewardArguments, option
from mca_train.tasks.task import Example, PairTask, ScoreTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mca_models import VirtualModels
    from mca_models.templates.classification_head import Head
    from mca_train.config.run_config import Settings
    from mca_train.data.encoding import RowEncoder, RowNumbers
    from mca_train.trainer.base import TrainerOptions
    from mca_train.trainer.scores import RewardTrainer


@dataclass(kw_only=True)
class RewardRunArguments:
    """Options of ``mca-train reward``."""

    center_rewards_coefficient: float | None = option(
        "Weight of the squared sum of a pair's rewards, which keeps them around 0; None: 0."
    )

    def __post_init__(self) -> None:
        if self.center_rewards_coefficient is not None and self.center_rewards_coefficient < 0:
            raise McaError(
                f"center_rewards_coefficient is {self.center_rewards_coefficient}; expected 0 or more"
            )


class Reward(PairTask, ScoreTask):
    """Reward model on pairs of answers of which one is better."""

    name = "reward"
    summary = "a reward model on preferences: chosen and rejected, with prompt and margin or without"
    data_arguments = RewardArguments
    task_arguments = RewardRunArguments
    required_content = "both answers whole, of two tokens or more,"
    needs_whole_rows = True  # both texts may be equal up to the truncation
    example = Example(
        rows="rows with `prompt`, `chosen` and `rejected`, and perhaps `margin`",
        task_lines="# center_rewards_coefficient: 0.01      # keeps rewards around 0\n",
    )
    metric_names = ("accuracy", "margin", "mean_reward", "min_reward", "max_reward")

    def encoder(
        self, names: Sequence[str], tokenizer: "PreTrainedTokenizerBase", data: DataArguments, key: str
    ) -> "RowEncoder":
        """Return the row encoder, as `AnswerTask.encoder`."""
        from mca_train.data.scoring import scored_pair_encoder

        return scored_pair_encoder(names, tokenizer, cast("RewardArguments", data), key)

    def numbers(self, names: Sequence[str], data: DataArguments, key: str) -> "RowNumbers | None":
        """Return the values of a row, as `AnswerTask.numbers`."""
        from mca_train.data.scoring import margin_reader

        return margin_reader(names, cast("RewardArguments", data), key)

    def head(self, settings: "Settings") -> "Head":
        """Return a head with one label."""
        from mca_models.templates.classification_head import Head

        return Head(kind="sequence_classification", labels=("LABEL_0",))

    def trainer(
        self, settings: "Settings", reference: "VirtualModels | None", options: "TrainerOptions"
    ) -> "RewardTrainer":
        """Return the trainer, as `Task.trainer`."""
        from mca_train.trainer.scores import RewardTrainer

        arguments = cast("RewardRunArguments", settings.own)
        return RewardTrainer(center_rewards_coefficient=arguments.center_rewards_coefficient, **options)
