"""What a run does whose ranks torchrun starts anew: it goes on from the last checkpoint that it wrote itself.

The first attempt notes what stood in ``output_dir`` when it began to train, where the next one finds it. So an
attempt that died before its first checkpoint begins as the first one did, from wherever that was to start.
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
from mca_train.checkpoint.directory import checkpoints
from mca_train.types import TrainerControl, TrainerState, TrainingArguments

if TYPE_CHECKING:
    from mca_models.megatron.distributed.rendezvous import Attempt

logger = logging.getLogger(__name__)

_BEFORE = "mca/checkpoints_before"


def can_restart() -> bool:
    """Return whether torchrun starts ranks anew that end with a failure.

    Then a run that was stopped before its end is one: another machine may be about to take the place of the one that
    was told to end, and torchrun would take the others for done.
    """
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def resume_values(values: Values, attempt: "Attempt | None") -> JsonObject:
    """The values of a run in this attempt: after the first one it resumes from its own last checkpoint.

    That is what ``auto`` means, unless the run had gone back and died before it set later ones aside. Collective.

    Args:
        values: As the user gave them.
        attempt: Which start of all ranks this is; None: the only one.
    """
    if attempt is None or attempt.number == 1:
        return dict(values)
    output_dir = Path(str(values.get("output_dir", "")))
    own = run_on_first_rank_unwrapped(lambda: _checkpoints_of_run(output_dir, attempt))
    if not own:
        logger.warning(
            "attempt %d: there is no complete checkpoint, so it starts like the first attempt", attempt.number
        )
        return dict(values)
    logger.warning("attempt %d: resuming from the last complete checkpoint", attempt.number)
    is_last = run_on_first_rank_unwrapped(lambda: own[-1] == checkpoints(output_dir)[-1])
    return {**values, "resume_from_checkpoint": "auto" if is_last else str(_last_undamaged(own))}


def _last_undamaged(own: Sequence[Path]) -> Path:
    """The last of the run's own checkpoints that is not damaged, as `auto` would choose; collective.

    If all are, the last, which is then refused with what is wrong.
    """
    for checkpoint in reversed(own):
        faults = integrity.faults(checkpoint, dist.get_rank(), dist.get_world_size())
        if not faults:
            return checkpoint
        logger.warning("%s is damaged: %s; trying the checkpoint before it", checkpoint, "; ".join(faults))
    return own[-1]


def _checkpoints_of_run(output_dir: Path, attempt: "Attempt") -> list[Path]:
    """Those that earlier attempts of this run wrote, oldest step first."""
    if not attempt.store.check([_BEFORE]):
        return []
    before = set(json.loads(attempt.store.get(_BEFORE)))
    return [path for path in checkpoints(output_dir) if _checkpoint_identity(path) not in before]


def _checkpoint_identity(checkpoint: Path) -> str:
    """A complete checkpoint in words that no other one of the same name has."""
    found = checkpoint.stat()
    return f"{checkpoint.name} {found.st_ino} {found.st_mtime_ns}"


class StartRecorder(TrainerCallback):  # type: ignore[misc]
    """Notes on the first rank what stands in ``output_dir`` when the first attempt begins to train.

    Args:
        attempt: The first one, or a later one, which finds that noted already.
    """

    def __init__(self, attempt: "Attempt") -> None:
        self._store = attempt.store

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Note it, once."""
        if state.is_world_process_zero and not self._store.check([_BEFORE]):
            self._store.set(
                _BEFORE,
                json.dumps([_checkpoint_identity(path) for path in checkpoints(Path(args.output_dir))]),
            )
