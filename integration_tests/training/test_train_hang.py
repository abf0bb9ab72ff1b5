"""A rank that is slow, one that sleeps and one that is stopped are named, with what they were doing."""

import ast
import logging
import os
import re
import signal
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from harness import RanksFailed, run_ranks
from train_cases import make_trainer, quietly

pytestmark = [pytest.mark.ranks, pytest.mark.one_fork]

_PATIENCE = 12  # seconds that ranks wait for each other
_SLOW, _SLEEPS, _STOPS = (2, 3), 4, 6
_SLOW_SECONDS = 60.0  # by the clock of the slow rank; what a busy machine takes of a step by chance is less


class Collected(logging.Handler):
    """Collected log messages; ``heard`` is set when a hang is reported."""

    def __init__(self, heard: Path) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        if is_of_sleep(self.texts[-1]):
            self._heard.touch()


def is_of_sleep(line: str) -> bool:
    """Return True if a hang is reported for the step in which the second rank sleeps; a busy machine may add others."""
    return "so far" in line and f"of step {_SLEEPS} has taken" in line


class Clock:
    """Stands for `time` where a rank measures how slow it is."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def perf_counter(self) -> float:
        return time.perf_counter() + self.ahead


def disturbed(trainer: Any, heard: Path) -> None:
    """Has the second rank be slow, then sleep until that is reported, then stop altogether."""
    from mca_train.metrics import stragglers

    step, clock = trainer.training_step, Clock()
    reading = trainer._data.loaders.collate
    stragglers.time = clock

    def now() -> int:
        return int(trainer.state.global_step) + 1

    def slow_rows(rows: Any) -> Any:
        if os.environ["RANK"] == "1" and now() in _SLOW:
            clock.ahead += _SLOW_SECONDS
        return reading(rows)

    def napping(batch: Any) -> Any:
        if os.environ["RANK"] == "1" and now() == _SLEEPS:
            while not heard.exists():  # the others give up after _PATIENCE
                time.sleep(0.05)
        if os.environ["RANK"] == "1" and now() == _STOPS:
            os.kill(os.getpid(), signal.SIGSTOP)
        return step(batch)

    trainer._data.loaders = replace(trainer._data.loaders, collate=slow_rows)
    trainer.training_step = napping


def hung(checkpoint: Path, output_dir: Path, printed: Path) -> None:
    from mca_models.megatron.distributed import rendezvous

    rendezvous.join("gloo", timedelta(seconds=_PATIENCE))
    trainer = make_trainer(checkpoint, output_dir, max_steps=8, gradient_accumulation_steps=1)
    logging.disable(logging.NOTSET)
    found = Collected(heard := printed.with_suffix(".heard"))
    logging.getLogger("mca_train").addHandler(found)
    disturbed(trainer, heard)
    try:
        quietly(trainer.train)
    finally:
        logs = [log for log in trainer.state.log_history if "slowest_rank" in log]
        printed.with_suffix(f".{os.environ['RANK']}").write_text("\n".join([*found.texts, str(logs)]))


@pytest.mark.qualify  # it waits for half a minute; test_hang_report.py and test_stragglers.py have the parts
def test_ranks_that_hold_up_the_others_are_named(checkpoint, tmp_path):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(
            2, hung, checkpoint, tmp_path / "run", tmp_path / "printed", process_group=False, timeout=240
        )
    ended = str(failed.value)
    assert f"mca_config.errors.McaError: forward and backward of step {_STOPS}: rank 1 on " in ended
    assert "has stopped reporting (stopped process or lost machine)" in ended
    assert f"(waited for {_PATIENCE} s, ddp_timeout)" in ended
    *lines, logs = (tmp_path / "printed.0").read_text().splitlines()
    by_step = {log["step"]: log for log in ast.literal_eval(logs)}
    for step in _SLOW:
        assert by_step[step]["slowest_rank"] == 1
        assert by_step[step]["slowest_rank_behind"] == pytest.approx(_SLOW_SECONDS, rel=0.4)
    # it is said once for a rank; a busy machine may have made it slow in the first step already
    assert any(re.match(f"step [1{_SLOW[0]}]: rank 1 on .* holds up the others", line) for line in lines)
    asleep = next(line for line in lines if is_of_sleep(line))
    assert "rank 1 on " in asleep
    assert "(napping)" in asleep
    assert "rank 0: waiting in " in asleep
