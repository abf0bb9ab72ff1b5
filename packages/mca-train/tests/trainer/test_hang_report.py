"""Report on a run that hangs."""

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mca_train.trainer.hang_detector import Heartbeat, current_call, describe_hang


def sign(rank: int, place: str, *, waits: bool = True, step: int = 7) -> Heartbeat:
    return Heartbeat(rank, 3, f"host{rank}", step, "the optimizer", place, waits)


def test_who_does_something_else_than_to_wait_is_named():
    signs = [
        sign(0, "all_reduce in a.py:1 (f)"),
        sign(1, "read.py:9 (sleep)", waits=False),
        sign(2, "b.py:2 (g)"),
    ]
    assert describe_hang(signs, []) == (
        "rank 1 on host1 in the optimizer of step 7: read.py:9 (sleep); rank 0: waiting in all_reduce in a.py:1 (f); "
        "rank 2: waiting in b.py:2 (g)"
    )


def test_who_is_silent_is_named_and_nobody_else_is_blamed():
    signs = [sign(rank, "barrier in a.py:1 (f)", waits=rank != 5) for rank in range(6)]
    assert describe_hang(signs, [3]) == (
        "rank 3 on host3 has stopped reporting (stopped process or lost machine); "
        "its last report was in the optimizer of step 7, barrier in a.py:1 (f); "
        "4 ranks (0, 1, 2, 4): waiting in barrier in a.py:1 (f)"
    )
    assert describe_hang([sign(0, "x"), None], []).startswith(
        "rank 1: training has not started there; rank 0: waiting in x"
    )


def seen(work: Callable[[], Any], place: str, end: Callable[[], Any]) -> bool:
    """Return True if a thread that runs ``work`` is reported to wait for others in ``place``, until ``end``."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    found = ("", False)
    for _ in range(6000):  # a minute
        found = current_call(sys._current_frames().get(thread.ident or 0))
        if re.fullmatch(place, found[0]):
            break
        time.sleep(0.01)
    end()
    thread.join()
    assert re.fullmatch(place, found[0])
    return found[1]


def test_a_call_of_torch_distributed_is_a_wait_and_is_named_with_its_caller():
    from torch.distributed import HashStore
    from torch.distributed.elastic.utils.store import synchronize

    store = HashStore()

    def ask() -> None:
        synchronize(store, b"", 0, 2, "nobody")

    def answer() -> None:
        synchronize(store, b"", 1, 2, "nobody")

    assert seen(ask, r"synchronize in trainer/test_hang_report\.py:\d+ \(ask\)", answer)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Return a pipe on which a thread waits without its own frame, and the function that ends the wait."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_anything_else_is_no_wait(pipe):
    def rest() -> None:
        os.read(pipe[0], 1)

    assert not seen(rest, r"trainer/test_hang_report\.py:\d+ \(rest\)", lambda: os.write(pipe[1], b"x"))


def test_the_end_of_a_with_block_is_no_place_of_its_own(pipe):
    from torch.distributed import distributed_c10d

    @contextlib.contextmanager
    def manager():
        yield
        os.read(pipe[0], 1)

    written = manager.__wrapped__.__code__.replace(co_filename=distributed_c10d.__file__)
    manager.__wrapped__.__code__ = written

    def reduce_all() -> None:
        with manager():
            pass

    place = r"manager in trainer/test_hang_report\.py:\d+ \(reduce_all\)"
    assert seen(reduce_all, place, lambda: os.write(pipe[1], b"x"))


def frames(*calls: tuple[str, str]) -> Any:
    """Return the innermost of frames, each of a file and a function; lines count from 1."""
    made = None
    for line, (file, name) in enumerate(calls, 1):
        code = SimpleNamespace(co_filename=file, co_name=name)
        made = SimpleNamespace(f_code=code, f_back=made, f_lineno=line)
    return made


TORCH = "lib/torch/distributed/distributed_c10d.py"


@pytest.mark.parametrize(
    ("calls", "words", "waits"),
    [
        (
            [("a/own.py", "train"), (TORCH, "all_reduce"), (TORCH, "wrapper")],
            "all_reduce in a/own.py:1 (train)",
            True,
        ),
        ([("a/own.py", "train"), (TORCH, "wrapper")], "a/own.py:1 (train)", True),
        (
            [("a/own.py", "train"), ("lib/contextlib.py", "__exit__"), (TORCH, "barrier")],
            "barrier in a/own.py:1 (train)",
            True,
        ),
        ([("a/own.py", "train"), ("lib/contextlib.py", "inner")], "lib/contextlib.py:2 (inner)", False),
        (
            [("a/own.py", "train"), ("lib/torch/nn/distributed.py", "forward")],
            "nn/distributed.py:2 (forward)",
            False,
        ),
        ([(TORCH, "barrier")], "barrier", True),
        ([], "nothing", False),
    ],
)
def test_a_wait_is_named_by_the_call_that_the_program_made(
    calls: list[tuple[str, str]], words: str, waits: bool
) -> None:
    assert current_call(frames(*calls)) == (words, waits)
