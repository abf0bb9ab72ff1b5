"""What a run carries from step to step beside the model, the optimizer and its place in the data.

It goes into every checkpoint, so that a run that is stopped and resumed logs and decides what one that was not does.
"""

from dataclasses import asdict, dataclass, field

from mca_config.types import JsonObject, Values


@dataclass(kw_only=True)
class Due:
    """What comes after the step of a checkpoint, and was not done when it was written."""

    evaluation: bool = False
    """Put off by SIGTERM."""
    save: bool = False
    """That would have come after this evaluation."""
    end_of_epoch: bool = False
    """If the epoch is over: its end has not been announced."""


@dataclass(kw_only=True)
class Totals:
    """Of the whole run."""

    loss: float = 0.0
    """Of all logged steps with a target."""
    steps: int = 0
    """Of which that is the sum."""
    updates: int = 0
    """Steps that were not skipped."""
    without_targets: int = 0
    """Of those that were."""
    logged: int = 0
    """The last step that a log covers."""
    grad_norm: float | None = None
    """Of the last step."""
    rate: float = 0.0
    """Of the last step."""

    @property
    def mean_loss(self) -> float:
        """Of a step."""
        return self.loss / max(self.steps, 1)


@dataclass(kw_only=True)
class Carried:
    """Numbers of a run; ``meters`` are what is summed up since the last log, by the name of who does it."""

    totals: Totals = field(default_factory=Totals)
    due: Due = field(default_factory=Due)
    meters: Values = field(default_factory=dict)
    run_kind: str | None = None
    """Of the trainer; None: an earlier version wrote it."""

    def document(self) -> JsonObject:
        """As JSON can hold it."""
        return asdict(self)

    @classmethod
    def read(cls, document: Values) -> "Carried":
        """From `document`."""
        return cls(
            totals=Totals(**document["totals"]),
            due=Due(**document["due"]),
            meters=document["meters"],
            run_kind=document.get("run_kind"),
        )
