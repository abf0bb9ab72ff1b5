"""A rank that is slow, one that sleeps and one that is stopped are named, with what they were doing."""

import logging
import os
import signal
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from harness import RanksFailed, run_ranks
from train_cases import make_trainer, quietly

pytestmark = pytest.mark.ranks

_PATIENCE = 8  # seconds that ranks wait for each other
_SLOW, _SLEEPS, _STOPS = (2, 3), 4, 6


class Collected(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def disturbed(trainer: Any) -> None:
    """Has the second rank be slow, then sleep, then stop altogether."""
    step = trainer.training_step
    reading = trainer._loaders.collate

    def now() -> int:
        return int(trainer.state.global_step) + 1

    def slow_rows(rows: Any) -> Any:
        if os.environ["RANK"] == "1" and now() in _SLOW:
            time.sleep(0.2)
        return reading(rows)

    def napping(batch: Any) -> Any:
        if os.environ["RANK"] == "1" and now() == _SLEEPS:
            time.sleep(_PATIENCE - 1)
        if os.environ["RANK"] == "1" and now() == _STOPS:
            os.kill(os.getpid(), signal.SIGSTOP)
        return step(batch)

    trainer._loaders, trainer.training_step = replace(trainer._loaders, collate=slow_rows), napping


def hung(checkpoint: Path, output_dir: Path, told: Path) -> None:
    from mca_models.megatron.distributed import attempts

    attempts.join("gloo", timedelta(seconds=_PATIENCE))
    trainer = make_trainer(checkpoint, output_dir, max_steps=8, gradient_accumulation_steps=1)
    logging.disable(logging.NOTSET)
    found = Collected()
    logging.getLogger("mca_train").addHandler(found)
    disturbed(trainer)
    try:
        quietly(trainer.train)
    finally:
        logs = [log for log in trainer.state.log_history if "slowest_rank" in log]
        told.with_suffix(f".{os.environ['RANK']}").write_text("\n".join([*found.texts, str(logs)]))


def test_ranks_that_hold_up_the_others_are_named(checkpoint, tmp_path):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, hung, checkpoint, tmp_path / "run", tmp_path / "told", process_group=False, timeout=60)
    ended = str(failed.value)
    assert f"mca_config.errors.McaError: forward and backward of step {_STOPS}: rank 1 on " in ended
    assert "gives no sign of life (stopped, or its machine is lost)" in ended
    assert f"(waited for {_PATIENCE} s, ddp_timeout)" in ended
    lines = (tmp_path / "told.0").read_text().splitlines()
    slow = [line for line in lines if "holds up the others" in line]  # a busy machine may add some of its own
    assert any(
        line.startswith(f"step {_SLOW[0]}: rank 1 on ") and "to read its batches" in line for line in slow
    )
    asleep = next(line for line in lines if "so far" in line)
    assert f"of step {_SLEEPS} has taken" in asleep
    assert "rank 1 on " in asleep
    assert "(napping)" in asleep
    assert "rank 0: waiting in " in asleep
    assert "'slowest_rank': 1" in lines[-1]
