"""``mca-train classify``: texts with a class, with labels, or with numbers (`trainer.scores`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, cast

from mca_config.errors import McaError
from mca_train.config.arguments import ClassifyArguments, DataArguments, option
from mca_train.losses.options import SCORE_METRICS
from mca_train.tasks.task import Example, ScoreTask, data_format_problems

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mca_config.model_config import McaModelConfig
    from mca_config.types import Values
    from mca_models import VirtualModels
    from mca_models.templates.classification_head import Head
    from mca_train.config.run_config import Settings
    from mca_train.data.encoding import RowEncoder, RowNumbers
    from mca_train.data.image_rows import ImageRows, RowContext
    from mca_train.trainer.base import TrainerOptions
    from mca_train.trainer.scores import ClassificationTrainer


@dataclass(kw_only=True)
class Labels(ClassifyArguments):
    """Labels of the classification head."""

    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] = option(
        "One class for each text, any number of labels, or numbers.", "single_label_classification"
    )
    labels: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Names of the labels; unset: those of the model's head, or LABEL_0, LABEL_1 and so on"
        },
    )
    num_labels: int | None = option("Number of labels, if they have no names; regression: 1.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels and self.num_labels not in (None, len(self.labels)):
            raise McaError(
                f"num_labels is {self.num_labels} but there are {len(self.labels)} labels; remove one"
            )
        if len(set(self.labels)) < len(self.labels):
            raise McaError(f"labels are {', '.join(self.labels)}; expected every name once")
        count = len(self.names)
        least = 2 if self.problem_type == "single_label_classification" else 1
        if count < least:
            raise McaError(f"labels (or num_labels) is not set; {self.problem_type} needs at least {least}")

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all labels."""
        count = self.num_labels or (1 if self.problem_type == "regression" else 0)
        return tuple(self.labels) or tuple(f"LABEL_{number}" for number in range(count))


class Classify(ScoreTask):
    """Classification or regression of texts."""

    name = "classify"
    summary = "on texts with a class, labels or numbers: text (or messages) and label"
    data_arguments = Labels
    unused_columns = ("prompt_column", "completion_column")
    required_content = "two tokens"
    example = Example(
        rows="rows with `text` and `label`",
        task_lines="labels: [negative, positive]            # or num_labels: 2; problem_type: regression, ...\n",
    )
    metric_names = ("accuracy", "mean_absolute_error")

    def check_columns(self, names: Sequence[str], data: DataArguments, key: str) -> None:
        """Raise an error for rows without a text or a label, as `Task.check_columns`."""
        from mca_train.data.formats import detect_format, require_label_column

        require_label_column(names, cast("Labels", data), key)
        detect_format(names, data, key, ("messages", "text"))

    def needs_chat_template(self, names: Sequence[str], data: DataArguments, key: str, row: "Values") -> bool:
        """Return True for rows with messages, as `Task.needs_chat_template`."""
        from mca_train.data.formats import detect_format

        return detect_format(names, data, key, ("messages", "text")) == "messages"

    def encoder(
        self, names: Sequence[str], tokenizer: "PreTrainedTokenizerBase", data: DataArguments, key: str
    ) -> "RowEncoder":
        """Return the row encoder, as `AnswerTask.encoder`."""
        from mca_train.data.scoring import text_encoder

        return text_encoder(names, tokenizer, cast("Labels", data), key)

    def image_rows(self, names: Sequence[str], context: "RowContext") -> "ImageRows":
        """Return the reader of rows with messages, whose media they place, or with a text."""
        from mca_train.data.formats import detect_format

        known = detect_format(names, context.data, context.key, ("messages", "text"))
        data = replace(context.data, data_format=known)
        return super().image_rows(names, replace(context, data=data))

    def numbers(self, names: Sequence[str], data: DataArguments, key: str) -> "RowNumbers":
        """Return the values of a row, as `AnswerTask.numbers`."""
        from mca_train.data.scoring import label_reader

        arguments = cast("Labels", data)
        return label_reader(names, arguments, arguments.names, arguments.problem_type, key)

    def problems(self, settings: "Settings") -> Iterator[str]:
        """Yield errors of sequence classification, and a metric that this problem type does not have."""
        yield from super().problems(settings)
        yield from data_format_problems(self.name, settings)
        metric = (settings.training.metric_for_best_model or "").removeprefix("eval_")
        kind = _arguments(settings).problem_type
        if metric in self.metric_names and metric != SCORE_METRICS[kind]:
            yield f"metric_for_best_model is {metric!r}; {kind} has {SCORE_METRICS[kind]}"

    def head(self, settings: "Settings") -> "Head":
        """Return a head with one output for each label."""
        from mca_models.templates.classification_head import Head

        arguments = _arguments(settings)
        return Head(
            kind="sequence_classification", labels=arguments.names, problem_type=arguments.problem_type
        )

    def resolve_labels(self, data: DataArguments, model: "McaModelConfig") -> DataArguments:
        """Return ``data`` with the model's label names, if it has none."""
        from mca_models.templates.classification_head import label_names

        labels, names = cast("Labels", data), label_names(model)
        if labels.labels or names == labels.names or len(names) != len(labels.names):
            return labels
        return replace(labels, labels=list(names))

    def trainer(
        self, settings: "Settings", reference: "VirtualModels | None", options: "TrainerOptions"
    ) -> "ClassificationTrainer":
        """Return the trainer, as `Task.trainer`."""
        from mca_train.trainer.scores import ClassificationTrainer

        return ClassificationTrainer(problem_type=_arguments(settings).problem_type, **options)


def _arguments(settings: "Settings") -> Labels:
    return cast("Labels", settings.data)
