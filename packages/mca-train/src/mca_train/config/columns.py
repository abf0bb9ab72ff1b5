"""The columns of rows that only some kinds of run read. Those that any may read are fields of `DataArguments`.

A new column is a field here, or there, and is read in ``data``.
"""

from dataclasses import dataclass, field

from mca_train.config.arguments import DataArguments
from mca_train.config.default_column import DefaultColumn


@dataclass(kw_only=True)
class PairArguments(DataArguments):
    """The same of a run on preference pairs."""

    chosen_column: str = field(
        default=DefaultColumn("chosen"), metadata={"help": "Column with the better answer."}
    )
    rejected_column: str = field(
        default=DefaultColumn("rejected"), metadata={"help": "Column with the worse answer."}
    )


@dataclass(kw_only=True)
class RewardArguments(PairArguments):
    """The same of a reward model."""

    margin_column: str = field(
        default=DefaultColumn("margin"),
        metadata={"help": "Column with how much better the better answer is; may be missing."},
    )


@dataclass(kw_only=True)
class ClassifyArguments(DataArguments):
    """The same of texts with labels."""

    label_column: str = field(
        default=DefaultColumn("label"),
        metadata={
            "help": "classify: column with the class, the labels, or the number(s). kto: whether the answer is good."
        },
    )
