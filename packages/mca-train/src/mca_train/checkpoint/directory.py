"""Checkpoint directories of a run: completeness, the ones to delete, and the state in them."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mca_config.errors import McaError, UsageError
from mca_config.files import read_json
from mca_config.types import JsonObject
from mca_models.megatron.distributed.collectives import run_on_first_rank
from mca_train.batching.position import RunPosition
from mca_train.checkpoint import integrity
from mca_train.checkpoint.output_files import (
    PREFIX,
    STATE_FILE,
    TRAINING,
    checkpoint_step,
    checkpoints,
    named_step,
    resolve,
)
from mca_train.checkpoint.training_state import LoopState
from mca_train.groups import Ranks
from mca_train.lr_schedule import followed_metric
from mca_train.types import OptimizerState, TrainingArguments

logger = logging.getLogger(__name__)
T = TypeVar("T")


def find(resume: str | bool | None, output_dir: Path, ranks: Ranks) -> Path | None:
    """Return the checkpoint that ``resume_from_checkpoint`` selects, after verifying its checksums; collective.

    With ``auto`` and True, a damaged checkpoint is reported and the one before it is tried.

    Raises:
        McaError: As `resolve`; or the named checkpoint, or every checkpoint, is damaged.
    """
    newest = resolve(resume, output_dir)
    selects_latest = str(resume).lower() in ("true", "last", "auto")
    paths = checkpoints(output_dir)[::-1] if selects_latest else [newest] if newest else []
    candidates = run_on_first_rank(lambda: paths)
    if selects_latest:
        _warn_incomplete(output_dir, next(iter(candidates), None))
    messages = []
    for candidate in candidates:
        faults = integrity.faults(candidate, ranks.rank, ranks.world_size)
        if not faults:
            return candidate
        messages.append(f"{candidate} is damaged: {'; '.join(faults)}")
        if len(candidates) > 1:
            logger.warning("%s; trying the checkpoint before it", messages[-1])
    if messages:
        raise McaError("resume_from_checkpoint: " + "\n".join(messages))
    if selects_latest:
        logger.info("no complete checkpoint in %s: starting from the beginning", output_dir)
    return None


def _warn_incomplete(output_dir: Path, newest: Path | None) -> None:
    """Warn about directories named like newer checkpoints that are incomplete."""
    step = checkpoint_step(newest) if newest else -1
    for path in sorted(output_dir.glob(f"{PREFIX}-*")):
        found = named_step(path.name)
        if found is not None and found > step:
            logger.warning("%s has no %s; it is incomplete and ignored", path, STATE_FILE)


def checkpoints_to_delete(output_dir: Path, limit: int | None, keep: str | None) -> list[Path]:
    """Return the oldest checkpoints beyond ``limit``, except the newest and the best (``keep``)."""
    if not limit or limit < 1:
        return []
    paths = checkpoints(output_dir)
    best = Path(keep).resolve() if keep else None
    older = [path for path in paths[:-1] if path.resolve() != best]
    return older[: max(len(paths) - limit, 0)]


def locate_best(state: OptimizerState, resumed: Path) -> None:
    """Correct the path of the best checkpoint in ``state``, which was loaded from the checkpoint ``resumed``.

    In a run that was moved or copied it is next to ``resumed``. If it is missing, there is no best checkpoint yet.
    """
    if state.best_model_checkpoint is None:
        return
    sibling = resumed.parent / Path(state.best_model_checkpoint).name
    if sibling.is_dir():
        state.best_model_checkpoint = str(sibling)
    elif not Path(state.best_model_checkpoint).is_dir():
        logger.warning(
            "the best checkpoint, %s, no longer exists; the best one is chosen from now on", sibling
        )
        state.best_model_checkpoint = state.best_metric = state.best_global_step = None


def reset_best_metric(state: OptimizerState, resumed: Path, args: TrainingArguments) -> bool:
    """Reset the best metric of ``state``, loaded from ``resumed``, if this run uses another metric.

    Returns:
        True if it was reset.
    """
    saved = read_json(resumed / integrity.ARGUMENTS_FILE, "the checkpoint is incomplete")
    before = followed_metric(saved["metric_for_best_model"], saved["greater_is_better"])
    now = followed_metric(args.metric_for_best_model, args.greater_is_better)
    if state.best_metric is None or now in (None, before):
        return False
    logger.warning(
        "the checkpoint's best model is by %s, this run's by %s: the best one is chosen from now on, and early "
        "stopping and a schedule that follows the metric start over",
        before,
        now,
    )
    state.best_model_checkpoint = state.best_metric = state.best_global_step = None
    return True


def load_position(checkpoint: Path) -> RunPosition:
    """Return the run's position in its data.

    Raises:
        McaError: The checkpoint holds the model only.
    """
    return _read_training(checkpoint, "position.json", lambda document: RunPosition(**document))


def require_kind(checkpoint: Path, kind: str) -> None:
    """Raise if the checkpoint records another kind of run than ``kind``.

    Raises:
        McaError: The kinds differ, or the checkpoint cannot be read.
    """
    saved = load_loop_state(checkpoint).run_kind
    if saved != kind:
        origin = f"a {saved} run" if saved else "another program"
        raise UsageError(
            f"resume_from_checkpoint: {checkpoint} is of {origin}, this is {kind}; to use its model, remove "
            "resume_from_checkpoint, set it as model_name_or_path (an adapter as adapter_name_or_path), and set "
            "another output_dir"
        )


def load_loop_state(checkpoint: Path) -> LoopState:
    """Return the loop state of a checkpoint.

    Raises:
        McaError: The checkpoint holds the model only.
    """
    return _read_training(checkpoint, "loop_state.json", LoopState.from_dict)


def _read_training(checkpoint: Path, name: str, build: Callable[[JsonObject], T]) -> T:
    """Return the result of ``build`` for a document about the training of ``checkpoint``."""
    folder = checkpoint / TRAINING
    if not (folder / "optimizer.json").is_file():
        raise UsageError(f"{checkpoint}: holds no optimizer state (save_only_model?); training cannot resume")
    fix = "to use its model, remove resume_from_checkpoint and set it as model_name_or_path"
    if not (folder / name).is_file():
        raise McaError(f"{folder / name}: is missing, so training cannot resume; {fix}")
    try:
        return build(json.loads((folder / name).read_text()))
    except (OSError, ValueError, TypeError, KeyError) as error:
        text = f"has no {error}" if isinstance(error, KeyError) else str(error)
        raise McaError(f"{folder / name}: cannot be read ({text}); training cannot resume; {fix}") from None
