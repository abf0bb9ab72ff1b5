"""State of the training loop besides the model, the optimizer and the position in the data.

Every checkpoint holds it, so that a resumed run logs and decides the same as an uninterrupted one.
"""

from dataclasses import asdict, dataclass, field

from mca_config.types import JsonObject, Values


@dataclass(kw_only=True)
class PendingEvents:
    """Events after the step of a checkpoint that had not happened when it was written."""

    evaluation: bool = False
    """An evaluation that SIGTERM deferred."""
    save: bool = False
    """A checkpoint that was due after this evaluation."""
    end_of_epoch: bool = False
    """The end of the epoch, if the epoch is over."""


@dataclass(kw_only=True)
class Totals:
    """Totals over the full run."""

    loss: float = 0.0
    """Sum over all logged steps with a target."""
    steps: int = 0
    """Number of steps in ``loss``."""
    updates: int = 0
    """Steps that were not skipped."""
    without_targets: int = 0
    """Steps that were skipped because they had no target."""
    logged: int = 0
    """The last step that a log covers."""
    grad_norm: float | None = None
    """Gradient norm of the last step."""
    rate: float = 0.0
    """Learning rate of the last step."""

    @property
    def mean_loss(self) -> float:
        """Return the mean loss of a logged step."""
        return self.loss / max(self.steps, 1)


@dataclass(kw_only=True)
class LoopState:
    """Loop state; ``meters`` holds sums since the last log by the name of their meter."""

    totals: Totals = field(default_factory=Totals)
    pending: PendingEvents = field(default_factory=PendingEvents)
    meters: Values = field(default_factory=dict)
    run_kind: str = ""
    """``run_kind`` of the trainer; empty: the loop is another program's."""

    def to_dict(self) -> JsonObject:
        """Return the state as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Values) -> "LoopState":
        """Build the state from `to_dict`."""
        return cls(
            totals=Totals(**document["totals"]),
            pending=PendingEvents(**document["pending"]),
            meters=document["meters"],
            run_kind=document["run_kind"],
        )
