"""Columns that only some kinds of run read; the other columns are fields of `DataArguments`."""

from dataclasses import dataclass, field

from mca_train.config.arguments import DataArguments
from mca_train.config.default_column import DefaultColumn


@dataclass(kw_only=True)
class PairArguments(DataArguments):
    """Data arguments of a run on preference pairs."""

    chosen_column: str = field(
        default=DefaultColumn("chosen"), metadata={"help": "Column with the better answer."}
    )
    rejected_column: str = field(
        default=DefaultColumn("rejected"), metadata={"help": "Column with the worse answer."}
    )


@dataclass(kw_only=True)
class RewardArguments(PairArguments):
    """Data arguments of a reward model."""

    margin_column: str = field(
        default=DefaultColumn("margin"),
        metadata={"help": "Column with how much better the better answer is; may be missing."},
    )


@dataclass(kw_only=True)
class ClassifyArguments(DataArguments):
    """Data arguments of texts with labels."""

    label_column: str = field(
        default=DefaultColumn("label"),
        metadata={
            "help": "classify: column with the class, the labels, or the number(s). kto: whether the answer is good."
        },
    )
