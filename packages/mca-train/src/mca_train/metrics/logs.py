"""Logs of a run: every log as one line of JSON in ``train_log.jsonl``, and as one line for a reader.

`StepLines` also prints a line for each evaluation and checkpoint, and for a resume. A progress bar is drawn only on a
terminal.
"""

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from transformers import ProgressCallback, TrainerCallback
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


_FIRST = {"loss": "loss {:.4f}", "learning_rate": "lr {:.2e}", "grad_norm": "norm {:.3g}"}
_SHOWN = {
    *_FIRST,
    "tokens_per_second",
    "step_time",
    "peak_memory_gib",
    "epoch",
    "mfu",
    "slowest_rank",
    "slowest_rank_behind",
}
"""Keys with a fixed position in a step's line."""
_IN_THE_FILE_ONLY = {
    *("samples_per_second", "pipeline_bubble", "model_tflops", "total_flos", "step"),
    *(f"{what}/{side}" for what in ("rewards", "logps") for side in ("chosen", "rejected")),
    *("min_reward", "max_reward"),
}
"""Keys left out of the lines, of evaluations too."""
_TIMES = ("_runtime", "_samples_per_second", "_steps_per_second")


class StepLines(ProgressCallback):  # type: ignore[misc]
    """Replacement of Hugging Face's progress bar and printer, removable like them.

    Args:
        bar: Also draw a progress bar.
    """

    def __init__(self, *, bar: bool) -> None:
        super().__init__()
        self._draws = bar
        if not bar:
            self.on_step_end = self.on_prediction_step = self.on_train_end = _do_nothing

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Start the bar at the step that the run resumes from, and print this step."""
        if self._draws:
            super().on_train_begin(args, state, control, **kwargs)
            super().on_step_end(args, state, control, **kwargs)
        if state.is_world_process_zero and state.global_step:
            self._print(f"resuming after step {state.global_step} of {state.max_steps}")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: JsonObject | None = None,
        **_: object,
    ) -> None:
        """Print the line of a log, if it has one."""
        if (
            state.is_world_process_zero
            and logs
            and (line := format_log_line(logs, state.global_step, state.max_steps))
        ):
            self._print(line)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Print that a checkpoint is complete."""
        if state.is_world_process_zero:
            self._print(f"saved {Path(args.output_dir) / f'checkpoint-{state.global_step}'}")

    def _print(self, line: str) -> None:
        if self.training_bar is not None:
            self.training_bar.write(line)
        else:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


def _do_nothing(*_: object, **__: object) -> None:
    """Take the place of an event of the progress bar."""


def format_log_line(logs: Mapping[str, object], step: int, steps: int) -> str | None:
    """Return the line of a log; None for the last log, which the summary covers."""
    if "train_runtime" in logs:
        return None
    parts = list(
        _step_parts(logs, steps - step)
        if logs.keys() & {"loss", "learning_rate"}
        else _evaluation_parts(logs)
    )
    prefix = [f"step {step:>{len(str(steps))}}/{steps}"] if steps else []  # empty without training
    return "  ".join([*prefix, *parts]) if parts else None


def _step_parts(logs: Mapping[str, object], left: int) -> Iterator[str]:
    values = {name: value for name, value in logs.items() if isinstance(value, int | float)}
    for name, form in _FIRST.items():
        if name in values:
            yield form.format(values[name])
    for name, value in values.items():
        if name not in _SHOWN | _IN_THE_FILE_ONLY:
            yield f"{name} {value:.4g}"
    if "slowest_rank" in values:
        yield f"rank {values['slowest_rank']} is {values['slowest_rank_behind']:.2g} s behind"
    if "tokens_per_second" in values:
        yield f"{values['tokens_per_second']:,.0f} tokens/s"
    if "mfu" in values:
        yield f"MFU {values['mfu']:.1%}"
    if "peak_memory_gib" in values:
        yield f"{values['peak_memory_gib']:.1f} GiB"
    if "step_time" in values and left > 0:
        yield f"{duration(values['step_time'] * left)} left"


def _evaluation_parts(logs: Mapping[str, object]) -> Iterator[str]:
    """Yield losses, other metrics and the duration of an evaluation."""
    seconds = 0.0
    for name, value in logs.items():
        known = name in _SHOWN or name.removeprefix("eval_") in _IN_THE_FILE_ONLY
        if known or not isinstance(value, int | float):
            continue
        if name.endswith("_runtime"):
            seconds += value
        elif not name.endswith(_TIMES):
            yield f"{name} {value:.4f}"
    if seconds:
        yield f"in {duration(seconds)}"


def duration(seconds: float) -> str:
    """Format seconds: ``12 s``, ``3 min 20 s``, ``5 h 03 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
