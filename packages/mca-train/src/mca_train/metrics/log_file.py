"""``train_log.jsonl``: every log of a run as one line of JSON."""

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from mca_config.files import atomic_write
from mca_config.types import JsonObject
from mca_train.types import TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)


class JsonlLog(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Callback that writes every log as a line of ``<output_dir>/train_log.jsonl``: step, time and values.

    A resumed run first removes lines after its checkpoint and incomplete lines. A log that cannot be written (a full
    disk) is reported once and does not end the run.

    Attributes:
        rounds_before: Number of earlier calls of ``train`` from step 0; lines of later rounds record it.
    """

    name = "train_log.jsonl"

    def __init__(self) -> None:
        self.rounds_before = 0
        self._begun = False
        self._has_warned = False

    def state(self) -> JsonObject:
        """Return the round, for checkpoints."""
        return {"args": {}, "attributes": {"rounds_before": self.rounds_before}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Keep the lines up to the step that the run starts from, and those of earlier rounds."""
        starts_over, is_repeated = not state.global_step, self._begun
        self.rounds_before += starts_over and is_repeated
        self._begun = True
        if not state.is_world_process_zero:
            return
        path = Path(args.output_dir) / self.name
        with self._warn_once_on_error(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = (
                path.read_bytes().splitlines() if path.exists() and (is_repeated or not starts_over) else []
            )
            kept = _lines_before(lines, self.rounds_before, state)
            with atomic_write(path) as temporary:
                temporary.write_bytes(b"".join(line + b"\n" for line in kept))
            broken = sum(_parse_position(line) is None for line in lines)
            if broken:
                logger.warning("%s: removed %d incomplete lines (was a run killed?)", path, broken)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: JsonObject | None = None,
        **_: object,
    ) -> None:
        """Append a line."""
        if not state.is_world_process_zero or not logs:
            return
        path = Path(args.output_dir) / self.name
        position = {
            "step": state.global_step,
            **({"rounds_before": self.rounds_before} if self.rounds_before else {}),
        }
        line = json.dumps({**position, "time": round(time.time(), 3), **logs}) + "\n"
        with self._warn_once_on_error(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(line)

    @contextlib.contextmanager
    def _warn_once_on_error(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                logger.warning(
                    "%s: cannot be written (%s); logs are lost until it can be written again",
                    path,
                    error.strerror,
                )
            self._has_warned = True


def _lines_before(lines: Sequence[bytes], rounds: int, state: TrainerState) -> Iterator[bytes]:
    """Yield the lines written before ``state`` of a round was saved; later lines may have the same step."""
    logs = getattr(state, "log_history", None)
    left = len(lines) if logs is None else sum(log["step"] == state.global_step for log in logs)
    last = (rounds, state.global_step)
    for line in lines:
        position = _parse_position(line)
        left -= position == last
        if position is not None and (position < last or (position == last and left >= 0)):
            yield line


def _parse_position(line: bytes) -> tuple[int, int] | None:
    """Return the number of earlier rounds and the step of a line."""
    try:
        entry = json.loads(line)
        return int(entry.get("rounds_before", 0)), int(entry["step"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
