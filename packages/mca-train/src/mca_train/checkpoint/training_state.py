"""State of training besides the model: optimizer, schedule, position in the data, random states, and the loop's own.

Every checkpoint holds it, so that a resumed run logs and decides the same as an uninterrupted one.
"""

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

from mca_config.errors import McaError
from mca_config.types import JsonObject, Typed, Values
from mca_models.megatron.distributed.collectives import (
    run_on_all_ranks,
    run_on_all_ranks_unwrapped,
    run_on_first_rank,
)
from mca_models.megatron.distributed.writer import PendingWrite
from mca_models.storage.atomic import write_file
from mca_train.batching.position import RunPosition
from mca_train.checkpoint import fp8_scales, optimizer_state
from mca_train.checkpoint.optimizer_state import ReadFp32
from mca_train.checkpoint.output_files import TRAINING
from mca_train.engine.engine import Engine
from mca_train.engine.rng import load_rng, matches_layout, save_rng
from mca_train.groups import Ranks
from mca_train.types import Upstream

logger = logging.getLogger(__name__)


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


class Schedule(Protocol):
    """Learning-rate schedule of a run."""

    def state_dict(self) -> JsonObject:
        """Return the state."""

    def load_state_dict(self, state: JsonObject, done: int, /) -> None:
        """Restore the state after ``done`` steps."""


class TrainingState:
    """State of training besides the model, to and from a checkpoint.

    Args:
        engine: With the optimizer and the wrapped chunks.
        scheduler: The learning rate, with ``state_dict`` and ``load_state_dict``.
        ranks: This rank.
        position: The run's position in its data.
    """

    def __init__(self, engine: Engine, scheduler: Schedule, ranks: Ranks, position: RunPosition) -> None:
        self._position = position
        self._engine = engine
        self._scheduler = scheduler
        self._ranks = ranks

    def begin_save(self, checkpoint: Path, loop_state: LoopState, *, background: bool) -> PendingWrite:
        """Write this rank's files and the shared ones; return the pending writes of the optimizer."""
        folder = checkpoint / TRAINING
        optimizer = folder / "optimizer"
        run_on_first_rank(lambda: optimizer.mkdir(parents=True))
        run_on_all_ranks(lambda: save_rng(folder, self._ranks))
        ranges = fp8_scales.collect(self._modules())
        run_on_all_ranks(lambda: fp8_scales.save(folder, self._ranks.rank, ranges))
        with _ignore_future_warnings():
            numbers, writing = optimizer_state.save(
                self._engine.optimizer, self._modules(), optimizer, background=background
            )
        numbers = replace(numbers, optimizer=self._engine.optimizer_name)
        documents = {"scheduler": self._scheduler.state_dict(), "optimizer": asdict(numbers)}
        documents |= {"position": asdict(self._position), "loop_state": loop_state.to_dict()}

        def write() -> None:
            for name, state in documents.items():
                write_file(folder / f"{name}.json", json.dumps(_to_json(state)).encode())

        run_on_first_rank(write)
        return writing

    def load(self, checkpoint: Path, read_weight: ReadFp32) -> None:
        """Restore the saved state.

        Args:
            checkpoint: The directory.
            read_weight: Reads a weight of its model.

        Raises:
            McaError: Another optimizer wrote it.
        """
        folder = checkpoint / TRAINING
        numbers = optimizer_state.Numbers(**json.loads((folder / "optimizer.json").read_text()))
        current = self._engine.optimizer_name
        if numbers.optimizer != current:
            raise McaError(
                f"{folder}: was written by optimizer {numbers.optimizer}, this run's is {current}; resume with the "
                "optimizer that it was written with"
            )
        with _ignore_future_warnings():
            optimizer_state.load(
                self._engine.optimizer, self._modules(), folder / "optimizer", numbers, read_weight
            )
        self._engine.sync_params()
        run_on_all_ranks_unwrapped(lambda: fp8_scales.load(folder, self._modules()))
        schedule = json.loads((folder / "scheduler.json").read_text())
        self._scheduler.load_state_dict(schedule, self._position.schedule_steps)

    def load_rng(self, checkpoint: Path, *, drops: bool) -> None:
        """Restore the random states, on all ranks or on none; collective.

        On another layout every rank keeps its new one: tensor ranks would otherwise drop replicated values differently.

        Args:
            checkpoint: The checkpoint.
            drops: The model has dropout, so that new random states are worth a warning.
        """
        folder = checkpoint / TRAINING
        if all(run_on_all_ranks_unwrapped(lambda: matches_layout(folder, self._ranks))):
            run_on_all_ranks_unwrapped(lambda: load_rng(folder, self._ranks))
        elif drops:
            logger.warning(
                "%s was written on another layout: dropout continues with other random numbers", checkpoint
            )

    def _modules(self) -> list[Upstream]:
        return [chunk.module for chunk in self._engine.chunks]


@contextlib.contextmanager
def _ignore_future_warnings() -> Iterator[None]:
    """Ignore FutureWarnings: Megatron's checkpoints use parts of torch that torch will replace."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _to_json(value: Typed) -> Typed:
    """Return ``value`` as JSON values, tensors as numbers."""
    if isinstance(value, dict):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    return value.item() if hasattr(value, "item") else value
