"""Ranks that torchrun starts anew go on from the last complete checkpoint by themselves; its own agent starts them."""

import json
import os
import signal
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest

from cli_runs import config, logs
from harness import free_port, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.one_fork]

_PR_SET_PDEATHSIG = 1
_KILLED_AT = 3
_STEPS = 6


def elastic(words: list[str], mark: Path, restarts: int) -> dict[int, int]:
    """Run torchrun for one node, on two forks; return the exit codes by rank."""
    return agent(words, mark, _settings(max_nodes=1, nproc_per_node=2, max_restarts=restarts), kills_rank=1)


def two_agents(words: list[str], mark: Path, port: int) -> tuple[dict[int, int], int]:
    """Two agents of ``--nnodes 1:2`` on this machine; the exit codes of the first one's ranks, how the other ended."""
    at, of_node = f"127.0.0.1:{port}", {"max_nodes": 2, "nproc_per_node": 1, "max_restarts": 3}
    other = os.fork()
    if not other:
        try:
            agent(words, mark, _settings(at, is_host="false", **of_node), kills_agent=True)
        finally:
            os._exit(1)
    codes = agent(words, mark, _settings(at, is_host="true", **of_node))
    return codes, os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])


def _settings(at: str = "127.0.0.1:0", is_host: str = "true", **others: Any) -> Any:
    from torch.distributed.launcher.api import LaunchConfig

    rendezvous = {"is_host": is_host, "last_call_timeout": 30}  # for another node, where one is enough
    alive = {"keep_alive_interval": 3, "keep_alive_max_attempt": 6}  # a machine may stall for as long
    return LaunchConfig(
        min_nodes=1,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint=at,
        rdzv_configs=rendezvous | alive,
        local_addr="127.0.0.1",
        monitor_interval=0.05,
        start_method="fork",
        shutdown_timeout=3,  # until a rank is killed that waits for the one that is gone
        **others,
    )


def agent(
    words: list[str], mark: Path, settings: Any, kills_rank: int | None = None, kills_agent: bool = False
) -> dict[int, int]:
    """torchrun's agent of a node; the exit codes of its ranks."""
    from torch.distributed.launcher.api import elastic_launch

    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(variable, None)
    CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    launch = elastic_launch(settings, entrypoint=rank_of_attempt)
    codes: dict[int, int] = launch(words, mark, kills_rank, kills_agent)
    return codes


def rank_of_attempt(words: list[str], mark: Path, kills_rank: int | None, kills_agent: bool) -> int:
    """One rank's ``mca-train``, which is killed in a step of the first attempt, with its agent if that is asked for."""
    from mca_train.cli import main
    from mca_train.engine.engine import Engine

    CDLL(None).prctl(
        _PR_SET_PDEATHSIG, signal.SIGKILL
    )  # torchrun's agent leaves ranks behind when it is killed
    step, counted = Engine.optimizer_step, [0]

    def killed(engine: Engine) -> Any:
        counted[0] += 1
        is_killed = kills_agent or os.environ["RANK"] == str(kills_rank)
        if is_killed and counted[0] == _KILLED_AT and not mark.exists():
            mark.write_text(os.environ["WORLD_SIZE"])
            if kills_agent:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return step(engine)

    Engine.optimizer_step = killed
    code = main(words)
    assert code == 0
    return code


def curve(output: Path) -> list[tuple[int, float]]:
    return [(log["step"], log["loss"]) for log in logs(output) if "loss" in log]


@pytest.mark.qualify
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


@pytest.mark.qualify
def test_a_node_that_is_lost_leaves_the_other_to_go_on_from_the_last_complete_checkpoint(folder, tmp_path):
    changes = {"max_steps": _STEPS, "save_strategy": "steps", "save_steps": 1}
    mark = tmp_path / "killed"
    _, _, _, *words = config(folder, "nodes", **changes)
    ((codes, ended),) = run_ranks(1, two_agents, words, mark, free_port(), process_group=False, timeout=200)
    assert mark.read_text() == "2"  # both nodes were in the run
    assert ended == -signal.SIGKILL
    assert codes == {0: 0}
    assert json.loads((folder / "nodes" / "trainer_state.json").read_text())["global_step"] == _STEPS
    assert [step for step, _ in curve(folder / "nodes")] == list(range(1, _STEPS + 1))
    last = folder / "nodes" / f"checkpoint-{_KILLED_AT - 1}"
    _, _, _, *words = config(folder, "alone", **changes, resume_from_checkpoint=str(last))
    (codes,) = run_ranks(1, elastic_alone, words, mark, process_group=False, timeout=90)
    assert codes == {0: 0}
    assert curve(folder / "alone") == curve(folder / "nodes")[_KILLED_AT - 1 :]


def elastic_alone(words: list[str], mark: Path) -> dict[int, int]:
    return agent(words, mark, _settings(max_nodes=1, nproc_per_node=1, max_restarts=0))
