"""``examples/train.slurm`` under a real SLURM: two nodes on this machine, each with a rank that torchrun starts.

Runs where SLURM's daemons can be started: as root, with Debian's ``slurmctld slurmd slurm-client munge``. Nothing here
depends on how long something takes: the second rank stops by itself where the test wants it (`HOLD`).
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tools import slurm_lab

import forked_cli
from cli_runs import config, logs
from source_tree import ROOT

STEPS = 8
PATIENCE = 150.0
"""Seconds after which something has not happened, on a machine with much else to do."""
HELD_IN = (3, 2)
"""The step of the first and of the second attempt in which the second rank waits."""
HOLD = '''"""On the second rank: waits in a step for SIGTERM, and says so by a file; before, steps last over a second.

Ranks of longer steps ask each other after every step whether to stop.
"""
import importlib.abc, importlib.util, os, pathlib, signal, sys, time

class Held(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "mca_train.engine.engine":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), hold(module.Engine))
        return spec

def hold(engine):
    attempt, steps = int(os.environ.get("SLURM_RESTART_COUNT", 0)), [int(n) for n in os.environ["HELD_IN"].split()]
    forward_backward, count, reported = engine.forward_backward, [0], []
    def held(self, batch):
        count[0] += 1
        if attempt < len(steps):
            time.sleep(1.1)
        if attempt < len(steps) and count[0] == steps[attempt]:
            before = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, lambda *given: (reported.append(1), before(*given)))
            pathlib.Path(os.environ["HELD"] + str(attempt)).touch()
            while not reported:
                time.sleep(0.1)
        return forward_backward(self, batch)
    engine.forward_backward = held

if os.environ.get("RANK") == "1" and "HELD" in os.environ:
    sys.meta_path.insert(0, Held())
'''


pytestmark = [
    pytest.mark.one_fork,
    pytest.mark.slurm,
    pytest.mark.ranks,
    pytest.mark.skipif(bool(slurm_lab.lacking()), reason=f"no SLURM: {slurm_lab.lacking()}"),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a SLURM that runs."""
    place = tmp_path_factory.mktemp("slurm")
    try:
        try:
            slurm_lab.start(place)
        except (SystemExit, OSError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"SLURM's daemons do not start here: {error}")
        yield place
    finally:
        slurm_lab.stop(place)


def asked(slurm: Path, *command: str, **environment: str) -> str:
    """Return the output of a SLURM command."""
    set_here = {
        "SLURM_CONF": str(slurm / "slurm.conf"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        **environment,
    }
    ran = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | set_here, timeout=PATIENCE, cwd=slurm
    )
    return ran.stdout.strip()


def submitted(slurm: Path, words: list[str], **environment: str) -> str:
    """The number of a job that runs on both nodes."""
    flags = ["--parsable", "--nodes=2", "--gpus-per-node=0", "--cpus-per-task=1", "--time=60"]
    return asked(
        slurm,
        "sbatch",
        *flags,
        str(ROOT / "examples" / "train.slurm"),
        *words,
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        GPUS_PER_NODE="1",
        GLOO_SOCKET_IFNAME="lo",
        MASTER_PORT=str(slurm_lab.free_ports(1)[0]),
        **environment,
    )


def state(slurm: Path, job: str) -> dict[str, str]:
    """Return SLURM's fields of a job."""
    words = asked(slurm, "scontrol", "show", "job", job).split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def nodes(slurm: Path) -> dict[str, str]:
    """Return the state of each node, such as ``idle``; a star marks one that does not answer."""
    return dict(line.split() for line in asked(slurm, "sinfo", "-h", "-N", "-o", "%N %t").splitlines())


def sending(slurm: Path) -> bool:
    """Return True while SLURM still sends a node a message, such as the end of its job."""
    lines = {" ".join(line.split()) for line in asked(slurm, "sdiag").splitlines()}
    return not {"Agent queue size: 0", "Agent count: 0"} <= lines


def until(slurm: Path, job: str, true: Callable[[dict[str, str]], bool]) -> dict[str, str]:
    """The job's state when ``true`` is."""
    last = time.monotonic() + PATIENCE
    while time.monotonic() < last:
        found = state(slurm, job)
        if found and true(found):
            return found
        time.sleep(0.3)
    raise AssertionError(f"{found}\n{nodes(slurm)}\n{output_of(slurm, job)}")


def let_in(slurm: Path, job: str) -> None:
    """Has a job that was put back begin when its nodes are free, where SLURM waits for two minutes.

    Nodes refuse a job that is older, in whole seconds, than their order to end it.
    """
    until(slurm, job, lambda _: set(nodes(slurm).values()) == {"idle"} and not sending(slurm))
    asked(slurm, "scontrol", "update", f"jobid={job}", "starttime=now+3seconds")


def output_of(slurm: Path, job: str) -> str:
    file = slurm / f"mca-train-{job}.log"
    return file.read_text() if file.exists() else "no output"


def losses(output: Path) -> list[tuple[int, float]]:
    return [(log["step"], log["loss"]) for log in logs(output) if "loss" in log]


def run_of(folder: Path, name: str, **changes: Any) -> list[str]:
    """A run that saves after every step."""
    return config(
        folder,
        name,
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        **changes,
    )


def test_a_job_goes_on_after_its_time_is_up_and_after_a_node_is_lost(slurm, folder):
    (slurm / "hold").mkdir()
    (slurm / "hold" / "sitecustomize.py").write_text(HOLD)
    job = submitted(
        slurm,
        run_of(folder, "slurm")[3:],
        PYTHONPATH=str(slurm / "hold"),
        HELD=str(slurm / "hold" / "attempt-"),
        HELD_IN=" ".join(map(str, HELD_IN)),
    )
    output = folder / "slurm"

    until(slurm, job, lambda _: (slurm / "hold" / "attempt-0").exists())
    asked(slurm, "scancel", "--batch", "--signal=USR1", job)  # as SLURM does before the job's time is up
    until(slurm, job, lambda found: (found["Restarts"], found["JobState"]) == ("1", "PENDING"))
    stopped = losses(output)[-1][0]
    assert HELD_IN[0] <= stopped <= HELD_IN[0] + 1
    assert f"stopped by SIGTERM after step {stopped} of {STEPS}" in output_of(slurm, job)
    assert (output / f"checkpoint-{stopped}").is_dir()

    let_in(slurm, job)
    until(slurm, job, lambda _: (slurm / "hold" / "attempt-1").exists())
    slurm_lab.fail(slurm, "n2")
    until(slurm, job, lambda _: "n1: task 0: Exited with exit code 1" in output_of(slurm, job))
    asked(slurm, "scontrol", "update", "nodename=n2", "state=down", "reason=lost")  # as after SlurmdTimeout
    until(slurm, job, lambda found: (found["Restarts"], found["JobState"]) == ("2", "PENDING"))
    assert losses(output)[-1][0] < STEPS
    until(slurm, job, lambda _: nodes(slurm) == {"n1": "idle", "n2": "down*"} and not sending(slurm))
    slurm_lab.revive(slurm, "n2")
    let_in(slurm, job)
    ended = until(slurm, job, lambda found: found["JobState"] in ("COMPLETED", "FAILED", "CANCELLED"))
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "2"), output_of(slurm, job)

    whole = forked_cli.launched(run_of(folder, "whole", nproc_per_node=2))
    assert whole.returncode == 0, whole.stderr
    assert [step for step, _ in losses(output)] == list(range(1, STEPS + 1))
    assert losses(output) == losses(folder / "whole")
    assert json.loads((output / "run.json").read_text())["world_size"] == 2


def test_a_wrong_configuration_is_told_in_a_line_and_not_tried_again(slurm, folder):
    job = submitted(slurm, [*config(folder, "wrong")[3:], "--learning-rat", "1"])
    ended = until(slurm, job, lambda found: found["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"))
    assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "0"), output_of(slurm, job)
    (reported,) = [line for line in output_of(slurm, job).splitlines() if line.startswith("error: ")]
    assert "unknown flag --learning_rat" in reported
