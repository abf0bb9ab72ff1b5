"""What a run does whose ranks torchrun starts anew: it goes on from the last checkpoint that it wrote itself.

The first attempt notes what stood in ``output_dir`` when it began to train, where the next one finds it. So an
attempt that died before its first checkpoint begins as the first one did, from wherever that was to start.
"""

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import TrainerCallback

from mca_config.types import JsonObject, Values
from mca_train.checkpoint.directory import checkpoints
from mca_train.types import TrainerControl, TrainerState, TrainingArguments

if TYPE_CHECKING:
    from mca_models.megatron.distributed.attempts import Attempt

logger = logging.getLogger(__name__)

_BEFORE = "mca/checkpoints_before"


def is_started_again() -> bool:
    """Whether torchrun starts ranks anew that end with a failure.

    Then a run that was stopped before its end is one: another machine may be about to take the place of the one that
    was told to end, and torchrun would take the others for done.
    """
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def continued(values: Values, attempt: "Attempt | None") -> JsonObject:
    """The values of a run in this attempt: after the first one ``resume_from_checkpoint`` is ``auto``.

    Args:
        values: As the user gave them.
        attempt: Which start of all ranks this is; None: the only one.
    """
    if attempt is None or attempt.number == 1:
        return dict(values)
    own = _own_checkpoints(Path(str(values.get("output_dir", ""))), attempt)
    if not own:
        logger.warning(
            "attempt %d: there is no complete checkpoint, so it starts like the first attempt", attempt.number
        )
        return dict(values)
    logger.warning("attempt %d: resuming from the last complete checkpoint", attempt.number)
    return {**values, "resume_from_checkpoint": "auto"}


def _own_checkpoints(output_dir: Path, attempt: "Attempt") -> list[str]:
    """Those that earlier attempts of this run wrote."""
    if not attempt.store.check([_BEFORE]):
        return []
    before = set(json.loads(attempt.store.get(_BEFORE)))
    return [name for name in _standing(output_dir) if name not in before]


def _standing(output_dir: Path) -> list[str]:
    """The complete checkpoints, each in words that no other one of the same name has."""
    found = [(path.name, path.stat()) for path in checkpoints(output_dir)]
    return [f"{name} {stat.st_ino} {stat.st_mtime_ns}" for name, stat in found]


class NotesStart(TrainerCallback):  # type: ignore[misc]
    """Notes on the first rank what stands in ``output_dir`` when the first attempt begins to train.

    Args:
        attempt: The first one, or a later one, which finds that noted already.
    """

    def __init__(self, attempt: "Attempt") -> None:
        self._store = attempt.store

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Notes it, once."""
        if state.is_world_process_zero and not self._store.check([_BEFORE]):
            self._store.set(_BEFORE, json.dumps(_standing(Path(args.output_dir))))
