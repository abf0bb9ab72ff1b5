"""Checkpoint directories of a run: their names, which is complete, which is the last, which may go."""

import json
import logging
import re
from pathlib import Path

from mca_config.errors import McaError, UsageError
from mca_config.files import naming_read_errors, read_json
from mca_models.megatron.distributed.collectives import run_on_first_rank
from mca_train.batching.position import RunPosition
from mca_train.checkpoint import integrity
from mca_train.checkpoint.loop_state import Carried, Totals
from mca_train.checkpoint.training_state import TRAINING
from mca_train.groups import Ranks
from mca_train.lr_schedule import followed_metric
from mca_train.types import OptimizerState, TrainingArguments

logger = logging.getLogger(__name__)

PREFIX = "checkpoint"
STATE_FILE = "trainer_state.json"
_NAME = re.compile(rf"{PREFIX}-(\d+)")


def checkpoints(output_dir: Path) -> list[Path]:
    """The complete checkpoints in ``output_dir``, oldest step first.

    Raises:
        McaError: It cannot be listed.
    """
    with naming_read_errors(output_dir):
        try:
            names = [path.name for path in output_dir.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = [(int(m[1]), output_dir / name) for name in names if (m := _NAME.fullmatch(name))]
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
    if inside and not (path / TRAINING).is_dir():
        raise McaError(
            f"resume_from_checkpoint: {path} is the directory of a run; name a checkpoint in it ({inside[-1].name}), "
            "or go on there with output_dir and auto"
        )
    if not (path / STATE_FILE).is_file():
        raise McaError(f"resume_from_checkpoint: {path} has no {STATE_FILE}; it is not a training checkpoint")
    return path


def find(resume: str | bool | None, output_dir: Path, ranks: Ranks) -> Path | None:
    """The checkpoint that ``resume_from_checkpoint`` means, whole in every byte; collective.

    Where it is up to us which one (``auto``, True), a damaged one is reported and the one before it is taken.

    Raises:
        McaError: As `resolve`; or what was named, or every checkpoint there is, is damaged.
    """
    newest = resolve(resume, output_dir)
    ours = str(resume).lower() in ("true", "last", "auto")
    found = checkpoints(output_dir)[::-1] if ours else [newest] if newest else []
    candidates = run_on_first_rank(lambda: found)
    if ours:
        _tell_of_incomplete(output_dir, next(iter(candidates), None))
    told = []
    for candidate in candidates:
        faults = integrity.faults(candidate, ranks.rank, ranks.world_size)
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
            logger.warning("%s has no %s; it is not a checkpoint and is ignored", path, STATE_FILE)


def expendable(output_dir: Path, limit: int | None, keep: str | None) -> list[Path]:
    """The oldest checkpoints beyond ``limit``, but never the newest or the best (``keep``)."""
    if not limit or limit < 1:
        return []
    found = checkpoints(output_dir)
    best = Path(keep).resolve() if keep else None
    others = [path for path in found[:-1] if path.resolve() != best]
    return others[: max(len(found) - limit, 0)]


def locate_best(state: OptimizerState, resumed: Path) -> None:
    """Corrects where ``state``, that of the checkpoint ``resumed``, says that the best one is.

    A run that was moved or copied has it beside the one that it goes on from. If it is gone, none is the best yet.
    """
    if state.best_model_checkpoint is None:
        return
    beside = resumed.parent / Path(state.best_model_checkpoint).name
    if beside.is_dir():
        state.best_model_checkpoint = str(beside)
    elif not Path(state.best_model_checkpoint).is_dir():
        logger.warning("the best checkpoint, %s, no longer exists; the best one from now on counts", beside)
        state.best_model_checkpoint = state.best_metric = state.best_global_step = None


def forget_best_of_other_metric(state: OptimizerState, resumed: Path, args: TrainingArguments) -> bool:
    """Drops the best value of ``state``, that of the checkpoint ``resumed``, if this run follows another metric.

    Returns:
        Whether it does.
    """
    there = read_json(resumed / integrity.ARGUMENTS_FILE, "the checkpoint is incomplete")
    before = followed_metric(there["metric_for_best_model"], there["greater_is_better"])
    now = followed_metric(args.metric_for_best_model, args.greater_is_better)
    if state.best_metric is None or now in (None, before):
        return False
    logger.warning(
        "the checkpoint's best model is that by %s, this run's by %s: the best one from now on counts, and early "
        "stopping and a schedule that follows the metric begin anew",
        before,
        now,
    )
    state.best_model_checkpoint = state.best_metric = state.best_global_step = None
    return True


def place_in(checkpoint: Path) -> RunPosition:
    """Where the run stood in its data.

    Raises:
        McaError: The checkpoint holds the model only.
    """
    folder = checkpoint / TRAINING
    if not (folder / "optimizer.json").is_file():
        raise UsageError(f"{checkpoint}: holds no optimizer state (save_only_model?); training cannot resume")
    try:
        return RunPosition(**json.loads((folder / "place.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise McaError(f"{folder / 'place.json'}: cannot be read ({error}); training cannot resume") from None


def require_kind(checkpoint: Path, kind: str) -> None:
    """Refuses to go on from the checkpoint of another kind of run than ``kind``, if it says of which it is.

    Raises:
        McaError: It is one, or it cannot be read.
    """
    there = carried_in(checkpoint, 0).run_kind
    if there not in (None, kind):
        raise UsageError(
            f"resume_from_checkpoint: {checkpoint} is of a {there} run, this is {kind}; to begin with its model, leave "
            "resume_from_checkpoint out, name it in model_name_or_path (an adapter in adapter_name_or_path), and set "
            "another output_dir"
        )


def carried_in(checkpoint: Path, step: int) -> Carried:
    """What the run carried after ``step``; a checkpoint of an earlier version has nothing."""
    path = checkpoint / TRAINING / "carried.json"
    if not path.is_file():
        return Carried(totals=Totals(updates=step, logged=step))
    try:
        return Carried.read(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise McaError(f"{path}: cannot be read ({error!r}); training cannot resume") from None
