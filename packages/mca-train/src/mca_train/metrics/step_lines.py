"""`StepLines` prints one line for each log, evaluation and checkpoint, and for a resume.

``train_log.jsonl`` (`log_file`) has all keys. A progress bar is drawn only on a terminal.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from transformers import ProgressCallback

from mca_config.types import JsonObject
from mca_train.types import TrainerControl, TrainerState, TrainingArguments

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

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Start the bar at the step that the run resumes from, and print this step."""
        if self._draws:
            super().on_train_begin(args, state, control, **kwargs)
            super().on_step_end(args, state, control, **kwargs)
        if state.is_world_process_zero and state.global_step:
            self._print(f"resuming after step {state.global_step} of {state.max_steps}")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Advance the bar."""
        if self._draws:
            super().on_step_end(args, state, control, **kwargs)

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: object = None,
        **kwargs: object,
    ) -> None:
        """Advance the evaluation's bar."""
        if self._draws:
            super().on_prediction_step(args, state, control, eval_dataloader=eval_dataloader, **kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Remove the bar."""
        if self._draws:
            super().on_train_end(args, state, control, **kwargs)

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
