"""`StepProfile` records some steps of a run with torch's profiler: a trace of each rank, and a table of operations."""

import logging
import os
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from mca_config.files import atomic_write
from mca_config.printable import counted
from mca_train.types import TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)
_ROWS = 20


class StepProfile(TrainerCallback):  # type: ignore[misc]
    """Writes ``<output_dir>/profile/rank_<5 digits>.json.gz``, a trace, and ``.txt``, a table of operations.

    Steps are counted from the start of this run, so a resumed run is profiled like a new one. The first rank prints its
    table.

    Args:
        rank: Global rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._began = 0
        self._profile: profile | None = None
        self._done = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Record the first step of the run."""
        self._began = state.global_step
        steps = state.max_steps - self._began
        if self._rank == 0 and 0 < steps < args.profile_step_start:
            logger.warning(
                "profile_step_start is %d, but this run has %s, so no step is profiled; lower profile_step_start",
                args.profile_step_start,
                counted(steps, "step"),
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Start recording."""
        ranks = args.profile_ranks
        here = ranks is None or self._rank in ranks
        if here and not self._done and state.global_step - self._began + 1 == args.profile_step_start:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences its message about missing GPUs
            self._profile = profile(activities=activities, record_shapes=True)
            self._profile.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Stop after the last selected step."""
        if state.global_step - self._began >= args.profile_step_end:
            self._write(Path(args.output_dir) / "profile")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Write a partial profile if the run ended early."""
        self._write(Path(args.output_dir) / "profile")

    def _write(self, folder: Path) -> None:
        if self._profile is None:
            return
        recorded, self._profile, self._done = self._profile, None, True
        recorded.stop()
        on_gpu = ProfilerActivity.CUDA in recorded.activities
        table = recorded.key_averages().table(
            sort_by="self_cuda_time_total" if on_gpu else "self_cpu_time_total",
            row_limit=_ROWS,
            max_name_column_width=48,
        )
        name = f"rank_{self._rank:05d}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.txt").write_text(table, encoding="utf-8")
            with atomic_write(folder / f"{name}.json.gz") as temporary:
                recorded.export_chrome_trace(str(temporary))
        except OSError as error:
            logger.warning(
                "%s: the profile cannot be written (%s); the run continues", folder, error.strerror
            )
            return
        if self._rank == 0:
            sys.stdout.write(f"{table}\nprofile: {folder}/{name}.json.gz; open it in ui.perfetto.dev\n")
            sys.stdout.flush()
