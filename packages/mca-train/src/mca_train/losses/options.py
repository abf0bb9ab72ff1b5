"""Names of the losses and checks of their arguments, without torch: ``mca-train`` needs them before its imports."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments

LossType = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    "sigmoid_norm",
    "simpo",
    "orpo",
]

_SORTED = "it sorts the pairs of a micro-batch, so the loss would depend on the layout; set another dpo_loss"
REFUSED = {
    "aot": _SORTED,
    "aot_unpaired": _SORTED,
    "sft": "it is supervised fine-tuning; set rpo_alpha, which adds it to another loss, or run mca-train sft",
    "kto": "it needs unpaired answers with a label; run mca-train kto",
    "kto_pair": "it needs unpaired answers with a label; run mca-train kto",
}
"""Names of TRL losses that are not supported, with the reason."""


ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]

PAIR_METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)
"""Logged metrics of pairs, in addition to the loss."""

SCORE_METRICS: Mapping[ProblemType, str] = {
    "single_label_classification": "accuracy",
    "multi_label_classification": "accuracy",
    "regression": "mean_absolute_error",
}
"""Logged metric of a sequence-classification head, in addition to the loss."""


def pair_key_problems(training: "TrainingArguments") -> Iterator[str]:
    """Yield an error for each argument that preference pairs do not support."""
    if training.label_smoothing_factor:
        yield "label_smoothing_factor is not supported for preference pairs; set dpo_label_smoothing"


def kto_key_problems(training: "TrainingArguments") -> Iterator[str]:
    """Yield an error for each argument that KTO does not support."""
    yield from pair_key_problems(training)
    if training.overlap_param_gather:
        yield (
            "overlap_param_gather is not supported with kto, which runs the model before a step; set it to false"
        )


def kto_step_problems(samples: int) -> Iterator[str]:
    """Yield an error if a step has too few samples."""
    if samples < 2:
        yield (
            "kto needs other samples in a step for the KL estimate, but a step has one sample; raise "
            "gradient_accumulation_steps"
        )


def kto_dataset_problems(samples: int) -> Iterator[str]:
    """Yield an error if a dataset has too few samples."""
    if samples < 2:
        number = "only one" if samples else "none"
        yield f"kto needs the answers of other samples, but a dataset has {number}; add more samples"


def score_key_problems(training: "TrainingArguments") -> Iterator[str]:
    """Yield an error for each argument that does not apply to sequence classification."""
    if training.label_smoothing_factor:
        yield "label_smoothing_factor is not supported with a sequence-classification head; remove it"
    if training.loss_chunk_size:
        yield "loss_chunk_size is not supported with a sequence-classification head; remove it"


def adapter_reference_problems(training: "TrainingArguments") -> Iterator[str]:
    """Yield an error for each argument that excludes the model without its adapter as the reference."""
    if training.overlap_param_gather:
        yield (
            "overlap_param_gather is not supported with the model without its adapter as reference; set it "
            "to false"
        )
