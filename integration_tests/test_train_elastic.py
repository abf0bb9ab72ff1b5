"""Ranks that torchrun starts anew go on from the last complete checkpoint by themselves; its own agent starts them."""

import json
import os
import signal
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest

from harness import run_ranks
from test_train_cli import config, folder, logs

__all__ = ["folder"]

pytestmark = pytest.mark.ranks

_PR_SET_PDEATHSIG = 1
_KILLED_AT = 3
_STEPS = 6


def elastic(words: list[str], mark: Path, restarts: int) -> dict[int, int]:
    """What torchrun does for one node, on two forks; the exit codes by rank."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(variable, None)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=restarts,
        monitor_interval=0.05,
        start_method="fork",
        shutdown_timeout=3,  # until a rank is killed that waits for the one that is gone
    )
    codes: dict[int, int] = elastic_launch(settings, entrypoint=rank_of_attempt)(words, mark)
    return codes


def rank_of_attempt(words: list[str], mark: Path) -> int:
    """One rank's ``mca-train``, which kills itself in a step of the first attempt if it is the second rank."""
    from mca_train.cli import main
    from mca_train.engine.engine import Engine

    CDLL(None).prctl(
        _PR_SET_PDEATHSIG, signal.SIGKILL
    )  # torchrun's agent leaves ranks behind when it is killed
    step, counted = Engine.optimizer_step, [0]

    def killed(engine: Engine) -> Any:
        counted[0] += 1
        if os.environ["RANK"] == "1" and counted[0] == _KILLED_AT and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return step(engine)

    Engine.optimizer_step = killed
    code = main(words)
    assert code == 0
    return code


def curve(output: Path) -> list[tuple[int, float]]:
    return [(log["step"], log["loss"]) for log in logs(output) if "loss" in log]


@pytest.mark.wide
def test_a_killed_rank_is_started_anew_and_the_curve_is_that_of_a_whole_run(folder, tmp_path):
    changes = {
        "max_steps": _STEPS,
        "tensor_model_parallel_size": 2,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    mark = tmp_path / "killed"
    _, _, _, *words = config(folder, "elastic", **changes)
    (codes,) = run_ranks(1, elastic, words, mark, 1, process_group=False, timeout=90)
    assert mark.exists()
    assert codes == {0: 0, 1: 0}
    _, _, _, *words = config(folder, "whole", **changes)
    (codes,) = run_ranks(1, elastic, words, mark, 0, process_group=False, timeout=90)
    assert codes == {0: 0, 1: 0}
    assert curve(folder / "elastic") == curve(folder / "whole")
    assert [step for step, _ in curve(folder / "elastic")] == list(range(1, _STEPS + 1))
    state = json.loads((folder / "elastic" / "trainer_state.json").read_text())
    assert state["global_step"] == _STEPS
