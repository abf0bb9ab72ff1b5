"""The harness itself: results in order, tracebacks shown, nothing left behind."""

import gc
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import harness
from harness import RanksFailed, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.one_fork]


def _sum_of_ranks(offset: int) -> tuple[int, int, torch.Tensor]:
    rank = torch.distributed.get_rank()
    total = torch.tensor([rank + offset])
    torch.distributed.all_reduce(total)
    return rank, int(total), torch.full((2,), rank)


def test_results_come_back_in_rank_order() -> None:
    results = run_ranks(3, _sum_of_ranks, 1)
    assert [r[:2] for r in results] == [(0, 6), (1, 6), (2, 6)]
    assert results[2][2].tolist() == [2, 2]


def _one_fails() -> None:
    if torch.distributed.get_rank() == 1:
        raise ValueError("planted")
    torch.distributed.barrier()


def test_a_failing_rank_brings_all_down_and_shows_its_traceback() -> None:
    reported = r"(?s)^rank 1 of 2: ValueError: planted\n--- rank 0.*rank 1 of 2: raised.*ValueError: planted"
    with pytest.raises(RanksFailed, match=reported):
        run_ranks(2, _one_fails, timeout=3600)  # longer than pytest's limit for a test


def _hangs(here: Path) -> None:
    if os.environ["RANK"] == "0":
        here.touch()
        time.sleep(600)


def test_a_hanging_rank_is_killed_and_its_stack_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, collect = tmp_path / "here", harness._collect

    def once_it_hangs(ranks: list[Any], deadline: float) -> None:
        while not here.exists():
            time.sleep(0.01)
        collect(ranks[1:], time.monotonic() + 600)
        collect(ranks[:1], time.monotonic() + 0.1)

    monkeypatch.setattr(harness, "_collect", once_it_hangs)
    with pytest.raises(
        RanksFailed, match=r"(?s)rank 0 of 2: had not finished.*_hangs.*rank 1 of 2: ended normally"
    ):
        run_ranks(2, _hangs, here, process_group=False)


def _dies() -> None:
    os._exit(3)


def test_a_dying_rank_is_noticed() -> None:
    with pytest.raises(RanksFailed, match="rank 0 of 1: died without a word"):
        run_ranks(1, _dies)


def test_no_rank_is_left_behind() -> None:
    run_ranks(2, _sum_of_ranks, 0)
    children = subprocess.run(
        ["ps", "--no-headers", "-o", "stat,args", "--ppid", str(os.getpid())],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    assert not [line for line in children if "ps " not in line and "[ps]" not in line and "pytest" in line]


def _exit_functions() -> list[Callable[..., Any]]:
    found: list[Callable[..., Any]] = []
    harness.atexit.register = found.append  # type: ignore[assignment]  # of this rank alone
    harness.prepare_parent.__wrapped__()
    return found


def test_what_the_parent_froze_is_freed_at_its_exit() -> None:
    """Otherwise nanobind reports leaks."""
    assert run_ranks(1, _exit_functions, process_group=False) == [[gc.unfreeze]]


@pytest.mark.qualify
def test_the_parent_ends_without_reports_of_leaks() -> None:
    code = "import harness; harness.prepare_parent()"
    folder = Path(harness.__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    assert "leaked" not in done.stderr


def _backward() -> float:
    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()
    return float(x.grad.sum()) if x.grad is not None else 0.0


def test_ranks_differentiate_even_if_their_parent_did() -> None:
    _backward()
    assert run_ranks(2, _backward) == [6.0, 6.0]


def faults_at_any_depth() -> int:
    """Pages that are new to this process while functions are called in loops, at 240 depths."""

    def leaf(*_: int) -> None:
        pass

    def down(depth: int) -> None:
        if depth:
            down(depth - 1)
            return
        for number in range(5000):
            leaf(number, number, number)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for depth in range(240):
        down(depth)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_calls_of_a_rank_map_no_memory_for_their_frames() -> None:
    (found,) = run_ranks(1, faults_at_any_depth, process_group=False)
    assert found < 2500  # 5,000 where one of these loops stands at the end of a piece of 16 KiB


CHILD = """
import signal, subprocess, sys
SHOW = "import signal; print(*[signal.getsignal(each) is signal.SIG_IGN for each in (signal.SIGINT, signal.SIGHUP)])"

def test_child():
    assert subprocess.check_output([sys.executable, "-c", SHOW], text=True).split() == ["False", "False"]
"""


def test_children_of_tests_catch_signals_that_the_test_run_inherited_as_ignored(tmp_path: Path) -> None:
    """``nohup pytest &`` starts so."""
    (tmp_path / "test_child.py").write_text(CHILD)
    root = Path(__file__).parents[2]
    command = [sys.executable, *"-m pytest -p conftest -n 0 -q".split(), tmp_path / "test_child.py"]
    done = subprocess.run(
        ["sh", "-c", 'trap "" INT HUP; exec "$@"', "sh", *command],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
