"""Training checkpoints: ``<output_dir>/checkpoint-<step>``, complete or absent.

    checkpoint-100/
      mca_config.json, iter_0000001/, ...   the model, an MCA checkpoint of its own
      training/optimizer/                   Megatron's distributed checkpoint of the optimizer
      training/rng_<rank>.safetensors       random states
      training/scheduler.json, training/optimizer.json, training/place.json
      trainer_state.json                    Hugging Face's TrainerState: step, epoch, logs, best metric
      training_args.json
      training/manifest.json                size and checksum of all this

All ranks write into a directory beside it, which rank 0 renames when everything is on disk (`CheckpointWriter`).
"""

import contextlib
import json
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mca_config.errors import McaError, UsageError
from mca_models.megatron.distributed.collectives import on_first, together
from mca_models.megatron.distributed.writer import Writing
from mca_models.storage.atomic import write_file
from mca_train import groups, integrity, optimizer_state
from mca_train.carried import Carried, Totals
from mca_train.groups import Ranks
from mca_train.progress import Place
from mca_train.rng import load_rng, save_rng

logger = logging.getLogger(__name__)

PREFIX = "checkpoint"
STATE_FILE = "trainer_state.json"
_TRAINING = "training"
_NAME = re.compile(rf"{PREFIX}-(\d+)")


def checkpoints(output_dir: Path) -> list[Path]:
    """The complete checkpoints in ``output_dir``, oldest step first."""
    if not output_dir.is_dir():
        return []
    found = [(int(m[1]), path) for path in output_dir.iterdir() if (m := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if (path / STATE_FILE).is_file()]


def step_of(checkpoint: Path) -> int:
    """The step of one of `checkpoints`."""
    return int(checkpoint.name.removeprefix(f"{PREFIX}-"))


def resolve(resume: str | bool | None, output_dir: Path) -> Path | None:
    """Which checkpoint ``resume_from_checkpoint`` means.

    Args:
        resume: None or False: none. True or "true": the last, which must exist. "auto": the last if there is
            one. Else a path.
        output_dir: Where the run's checkpoints are.

    Raises:
        McaError: It does not exist or is not complete.
    """
    word = str(resume).lower()
    if resume is None or word in ("false", "none", ""):
        return None
    if word in ("true", "last", "auto"):
        last = next(reversed(checkpoints(output_dir)), None)
        if last is None and word != "auto":
            raise McaError(f"resume_from_checkpoint: no complete {PREFIX}-<step> in {output_dir}")
        return last
    path = Path(str(resume))
    if not path.is_dir():
        what = "is a file, not a directory" if path.exists() else "does not exist"
        raise UsageError(f"resume_from_checkpoint: {path} {what}")
    inside = checkpoints(path)
    if inside and not (path / _TRAINING).is_dir():
        raise McaError(
            f"resume_from_checkpoint: {path} is the directory of a run; name a checkpoint in it ({inside[-1].name}), "
            "or go on there with output_dir and auto"
        )
    if not (path / STATE_FILE).is_file():
        raise McaError(f"resume_from_checkpoint: {path} has no {STATE_FILE}; it is not a training checkpoint")
    return path


def find(resume: str | bool | None, output_dir: Path, ranks: Ranks) -> Path | None:
    """The checkpoint that ``resume_from_checkpoint`` means, whole in every byte; collective.

    Where it is up to us which one (``auto``, True), a damaged one is told and the one before it is taken.

    Raises:
        McaError: As `resolve`; or what was named, or every checkpoint there is, is damaged.
    """
    newest = resolve(resume, output_dir)
    ours = str(resume).lower() in ("true", "last", "auto")
    found = checkpoints(output_dir)[::-1] if ours else [newest] if newest else []
    candidates: list[Path] = groups.broadcast_object(found)
    if ours:
        _tell_of_incomplete(output_dir, next(iter(candidates), None))
    told = []
    for candidate in candidates:
        faults = integrity.faults(candidate, ranks)
        if not faults:
            return candidate
        told.append(f"{candidate} is damaged: {'; '.join(faults)}")
        if len(candidates) > 1:
            logger.warning("%s; trying the checkpoint before it", told[-1])
    if told:
        raise McaError("resume_from_checkpoint: " + "\n".join(told))
    return None


def _tell_of_incomplete(output_dir: Path, newest: Path | None) -> None:
    """Says what looks like a newer checkpoint than the newest one, and is none."""
    step = step_of(newest) if newest else -1
    for path in sorted(output_dir.glob(f"{PREFIX}-*")):
        match = _NAME.fullmatch(path.name)
        if match and int(match[1]) > step:
            logger.warning("%s has no %s; it is no checkpoint and is passed over", path, STATE_FILE)


def expendable(output_dir: Path, limit: int | None, keep: str | None) -> list[Path]:
    """The oldest checkpoints beyond ``limit``, but never the newest or the best (``keep``)."""
    if not limit or limit < 1:
        return []
    found = checkpoints(output_dir)
    best = Path(keep).resolve() if keep else None
    others = [path for path in found[:-1] if path.resolve() != best]
    return others[: max(len(found) - limit, 0)]


def locate_best(state: Any, resumed: Path) -> None:
    """Corrects where ``state``, that of the checkpoint ``resumed``, says that the best one is.

    A run that was moved or copied has it beside the one that it goes on from. If it is gone, none is the best yet.
    """
    if state.best_model_checkpoint is None:
        return
    beside = resumed.parent / Path(state.best_model_checkpoint).name
    if beside.is_dir():
        state.best_model_checkpoint = str(beside)
    elif not Path(state.best_model_checkpoint).is_dir():
        logger.warning("the best checkpoint, %s, is gone; the best from here on counts", beside)
        state.best_model_checkpoint = state.best_metric = state.best_global_step = None


def place_in(checkpoint: Path) -> Place:
    """Where the run stood in its data.

    Raises:
        McaError: The checkpoint holds the model only.
    """
    folder = checkpoint / _TRAINING
    if not (folder / "optimizer.json").is_file():
        raise UsageError(f"{checkpoint}: holds no optimizer state (save_only_model?); training cannot resume")
    try:
        return Place(**json.loads((folder / "place.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise McaError(f"{folder / 'place.json'}: cannot be read ({error}); training cannot resume") from None


def carried_in(checkpoint: Path, step: int) -> Carried:
    """What the run carried after ``step``; a checkpoint of an earlier version has nothing."""
    path = checkpoint / _TRAINING / "carried.json"
    if not path.is_file():
        return Carried(totals=Totals(updates=step, logged=step))
    try:
        return Carried.read(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise McaError(f"{path}: cannot be read ({error!r}); training cannot resume") from None


class TrainingState:
    """What training needs beyond the model, to and from a checkpoint.

    Args:
        engine: With the optimizer and the wrapped chunks.
        scheduler: The learning rate, with ``state_dict`` and ``load_state_dict``.
        rank: Of this process.
        place: Where the run stands in its data.
    """

    def __init__(self, engine: Any, scheduler: Any, rank: int, place: Place) -> None:
        self._place = place
        self._engine = engine
        self._scheduler = scheduler
        self._rank = rank

    def begin_save(self, checkpoint: Path, carried: Carried, *, background: bool) -> Writing:
        """Writes this rank's part, and what one rank writes for all; the optimizer's tensors have yet to be."""
        folder = checkpoint / _TRAINING
        optimizer = folder / "optimizer"
        on_first(lambda: optimizer.mkdir(parents=True))
        together(lambda: save_rng(folder, self._rank))
        with _without_warnings():
            numbers, writing = optimizer_state.save(
                self._engine.optimizer, self._modules(), optimizer, background=background
            )
        words = {"scheduler": self._scheduler.state_dict(), "optimizer": asdict(numbers)}
        words |= {"place": asdict(self._place), "carried": carried.document()}

        def write() -> None:
            for name, state in words.items():
                write_file(folder / f"{name}.json", json.dumps(_plain(state)).encode())

        on_first(write)
        return writing

    def load(self, checkpoint: Path) -> None:
        """Restores what was saved."""
        folder = checkpoint / _TRAINING
        numbers = optimizer_state.Numbers(**json.loads((folder / "optimizer.json").read_text()))
        with _without_warnings():
            optimizer_state.load(self._engine.optimizer, self._modules(), folder / "optimizer", numbers)
        self._scheduler.load_state_dict(json.loads((folder / "scheduler.json").read_text()))

    def load_rng(self, checkpoint: Path) -> None:
        """Restores the random states; with another number of ranks, those of this run stay."""
        if not load_rng(checkpoint / _TRAINING, self._rank):
            logger.warning("%s: no random state of rank %d; dropout starts anew", checkpoint, self._rank)

    def _modules(self) -> list[Any]:
        return [chunk.module for chunk in self._engine.chunks]


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Megatron's checkpoints use parts of torch that torch is about to replace."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it, tensors as numbers."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.item() if hasattr(value, "item") else value
