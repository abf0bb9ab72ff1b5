"""What is said of a run that hangs."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from mca_train.trainer.hang_report import Sign, doing, told


def sign(rank: int, place: str, *, waits: bool = True, step: int = 7) -> Sign:
    return Sign(rank, 3, f"host{rank}", step, "the optimizer", place, waits)


def test_who_does_something_else_than_to_wait_is_named():
    signs = [
        sign(0, "all_reduce in a.py:1 (f)"),
        sign(1, "read.py:9 (sleep)", waits=False),
        sign(2, "b.py:2 (g)"),
    ]
    assert told(signs, []) == (
        "rank 1 on host1 in the optimizer of step 7: read.py:9 (sleep); rank 0: waiting in all_reduce in a.py:1 (f); "
        "rank 2: waiting in b.py:2 (g)"
    )


def test_who_is_silent_is_named_and_nobody_else_is_blamed():
    signs = [sign(rank, "barrier in a.py:1 (f)", waits=rank != 5) for rank in range(6)]
    assert told(signs, [3]) == (
        "rank 3 on host3 gives no sign of life (stopped, or its machine is lost); its last was in the optimizer of "
        "step 7, barrier in a.py:1 (f); 4 ranks (0, 1, 2, 4): waiting in barrier in a.py:1 (f)"
    )
    assert told([sign(0, "x"), None], []).startswith(
        "rank 1: training has not begun there; rank 0: waiting in x"
    )


def seen(work: Callable[[], Any]) -> tuple[str, bool]:
    """What a thread does that runs ``work``, which takes a while."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    time.sleep(0.3)
    found = doing(sys._current_frames().get(thread.ident or 0))
    thread.join()
    return found


def test_a_call_of_torch_distributed_is_a_wait_and_is_named_with_its_caller():
    from torch.distributed import HashStore
    from torch.distributed.elastic.utils.store import synchronize

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            synchronize(HashStore(), b"", 0, 2, "nobody", timeout=1.0)

    place, waits = seen(ask)
    assert waits
    assert place.startswith("synchronize in trainer/test_hang_report.py:")
    assert place.endswith("(ask)")


def test_anything_else_is_no_wait():
    def rest() -> None:
        time.sleep(1)

    place, waits = seen(rest)
    assert not waits
    assert place.startswith("trainer/test_hang_report.py:")
    assert place.endswith("(rest)")


def test_the_end_of_a_with_block_is_no_place_of_its_own():
    from torch.distributed import distributed_c10d

    @contextlib.contextmanager
    def manager():
        yield
        time.sleep(1)

    written = manager.__wrapped__.__code__.replace(co_filename=distributed_c10d.__file__)
    manager.__wrapped__.__code__ = written

    def reduce_all() -> None:
        with manager():
            pass

    place, waits = seen(reduce_all)
    assert waits
    assert place.startswith("manager in trainer/test_hang_report.py:")
