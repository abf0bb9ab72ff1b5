"""Restart of a run by torchrun: the run resumes from the last checkpoint that it wrote itself.

The first attempt records the checkpoints in ``output_dir`` at its start for later attempts. So an attempt that ended
before its first checkpoint starts from the same state as the first attempt.
"""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from transformers import TrainerCallback

from mca_config.types import JsonObject, Values
from mca_models.megatron.distributed.collectives import run_on_first_rank_unwrapped
from mca_train.checkpoint import integrity
from mca_train.checkpoint.output_files import checkpoints
from mca_train.types import TrainerControl, TrainerState, TrainingArguments

if TYPE_CHECKING:
    from mca_models.megatron.distributed.rendezvous import Attempt

logger = logging.getLogger(__name__)

_BEFORE = "mca/checkpoints_before"


def can_restart() -> bool:
    """Return whether torchrun restarts failed ranks.

    Then a stopped run exits with a failure: another machine may replace the stopped one, and after exit code 0 torchrun
    would treat the other ranks as finished.
    """
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def resume_values(values: Values, attempt: "Attempt") -> JsonObject:
    """Return the values of this attempt, which after the first one resume from the run's last checkpoint.

    Usually that is ``auto``, unless the run had resumed from an earlier checkpoint and ended before it moved the later
    ones away. Collective.

    Args:
        values: Values of the user.
        attempt: The attempt.
    """
    if attempt.number == 1:
        return dict(values)
    output_dir = Path(str(values.get("output_dir", "")))
    written = run_on_first_rank_unwrapped(lambda: _list_written_checkpoints(output_dir, attempt))
    if not written:
        logger.warning(
            "attempt %d: there is no complete checkpoint, so it starts like the first attempt", attempt.number
        )
        return dict(values)
    logger.warning("attempt %d: resuming from the last complete checkpoint", attempt.number)
    is_last = run_on_first_rank_unwrapped(lambda: written[-1] == checkpoints(output_dir)[-1])
    return {**values, "resume_from_checkpoint": "auto" if is_last else str(_last_undamaged(written))}


def _last_undamaged(written: Sequence[Path]) -> Path:
    """Return the last undamaged checkpoint of the run, like `auto`; collective.

    If all are damaged, return the last one, whose load then reports the damage.
    """
    for checkpoint in reversed(written):
        faults = integrity.faults(checkpoint, dist.get_rank(), dist.get_world_size())
        if not faults:
            return checkpoint
        logger.warning("%s is damaged: %s; trying the checkpoint before it", checkpoint, "; ".join(faults))
    return written[-1]


def _list_written_checkpoints(output_dir: Path, attempt: "Attempt") -> list[Path]:
    """Return the checkpoints of earlier attempts of this run, oldest step first."""
    if not attempt.store.check([_BEFORE]):
        return []
    before = set(json.loads(attempt.store.get(_BEFORE)))
    return [path for path in checkpoints(output_dir) if _checkpoint_identity(path) not in before]


def _checkpoint_identity(checkpoint: Path) -> str:
    """Return a text that identifies a complete checkpoint among those with the same name."""
    status = checkpoint.stat()
    return f"{checkpoint.name} {status.st_ino} {status.st_mtime_ns}"


class StartRecorder(TrainerCallback):  # type: ignore[misc]
    """Callback that records on rank 0 the checkpoints in ``output_dir`` at the start of the first attempt.

    Args:
        attempt: This attempt; a later one keeps the record of the first.
    """

    def __init__(self, attempt: "Attempt") -> None:
        self._store = attempt.store

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Record the checkpoints, once."""
        if state.is_world_process_zero and not self._store.check([_BEFORE]):
            self._store.set(
                _BEFORE,
                json.dumps([_checkpoint_identity(path) for path in checkpoints(Path(args.output_dir))]),
            )
