"""``mca-train kto``: preference tuning on unpaired answers that are good or bad (`losses.preference`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from mca_config.errors import McaError
from mca_train.config.arguments import ClassifyArguments, DataArguments, option
from mca_train.losses.options import kto_dataset_problems, kto_key_problems, kto_step_problems
from mca_train.tasks.sft import Sft
from mca_train.tasks.task import Example, ReferenceArguments, adapter_reference_problems

if TYPE_CHECKING:
    from collections.abc import Sized

    from megatron.core.transformer import TransformerConfig

    from mca_config.types import Values
    from mca_models import VirtualModels
    from mca_train.config.run_config import Settings
    from mca_train.data.encoding import RowNumbers
    from mca_train.data.token_dataset import Samples
    from mca_train.losses.preference import KtoLoss
    from mca_train.losses.preference_options import KtoOptions
    from mca_train.trainer.base import TrainerOptions
    from mca_train.trainer.kto import KtoTrainer


@dataclass(kw_only=True)
class KtoArguments(ReferenceArguments):
    """Options of ``mca-train kto``."""

    kto_beta: float = option("Strength of the KL penalty against the reference.", 0.1)
    desirable_weight: float = option("Weight of good answers in the loss.", 1.0)
    undesirable_weight: float = option("Weight of bad answers in the loss.", 1.0)

    def __post_init__(self) -> None:
        self._options()

    def _options(self) -> "KtoOptions":
        from mca_train.losses.preference_options import KtoOptions

        return KtoOptions(
            beta=self.kto_beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )

    def loss(self) -> "KtoLoss":
        """Return the loss with these options."""
        from mca_train.losses.preference import KtoLoss

        return KtoLoss(**vars(self._options()))


class Kto(Sft):
    """Preference tuning on sft rows with a label, good or bad."""

    name = "kto"
    summary = "on answers that are good or bad: prompt, completion and label"
    data_arguments = ClassifyArguments
    task_arguments = KtoArguments
    example = Example(
        rows="rows with `prompt`, `completion` and `label`, true or false", learning_rate="5.0e-7"
    )
    metric_names = (
        "kl",
        "rewards/chosen",
        "rewards/rejected",
        "rewards/margins",
        "logps/chosen",
        "logps/rejected",
    )

    def check_columns(self, names: Sequence[str], data: DataArguments, key: str) -> None:
        """Raise an error for rows without an answer or a label, as `Task.check_columns`."""
        from mca_train.data.formats import require_label_column

        require_label_column(names, cast("ClassifyArguments", data), key)
        super().check_columns(names, data, key)

    def numbers(self, names: Sequence[str], data: DataArguments, key: str) -> "RowNumbers":
        """Return the values of a row, as `AnswerTask.numbers`."""
        from mca_train.data.formats import require_label_column

        require_label_column(names, cast("ClassifyArguments", data), key)
        column = cast("ClassifyArguments", data).label_column

        def good(row: "Values") -> list[float]:
            if row[column] not in (True, False):
                raise McaError(f"{column} is {row[column]!r:.80}; expected true for a good answer, or false")
            return [float(row[column])]

        return good

    def problems(self, settings: "Settings") -> Iterator[str]:
        """Yield an error for each setting that KTO does not support, or that leaves no reference."""
        arguments, training = _arguments(settings), settings.training
        yield from kto_key_problems(training)
        yield from adapter_reference_problems(settings, arguments)
        if settings.data.streaming:
            yield "kto needs all rows before training; set streaming to false"

    def problems_in_megatron(self, settings: "Settings", megatron: "TransformerConfig") -> Iterator[str]:
        """Yield an error for each loss per token and each setting for samples of one length."""
        from mca_train.losses.preference import kto_model_problems

        return kto_model_problems(megatron)

    def problems_in_steps(self, samples: int) -> Iterator[str]:
        """Yield an error if a step has no other samples for the KL estimate."""
        return kto_step_problems(samples)

    def problems_in_dataset(self, samples: "Samples") -> Iterator[str]:
        """Yield an error if a dataset has no other samples for the KL estimate."""
        return kto_dataset_problems(len(cast("Sized", samples)))  # streams have been rejected

    def extra_forward_passes(self, settings: "Settings") -> int:
        """Return 3: the reference on the answers, both models on the mismatched answers."""
        return 3

    def reference(self, settings: "Settings") -> str | None:
        """Return the configured reference or the initial model; None if the adapter's base model serves."""
        path = _arguments(settings).reference_model_name_or_path
        return settings.data.model_name_or_path if path is None and not settings.lora.is_enabled else path

    def trainer(
        self, settings: "Settings", reference: "VirtualModels | None", options: "TrainerOptions"
    ) -> "KtoTrainer":
        """Return the trainer, as `Task.trainer`."""
        from mca_train.trainer.kto import KtoTrainer

        return KtoTrainer(reference=reference, loss=_arguments(settings).loss(), **options)


def _arguments(settings: "Settings") -> KtoArguments:
    return cast("KtoArguments", settings.own)
