"""Runs a function on 1 to 8 gloo ranks: Megatron is imported once, then every case forks its ranks.

    from harness import run_ranks

    @pytest.mark.ranks
    def test_sum() -> None:
        assert run_ranks(2, add_up, 3) == [6, 6]

    def add_up(x: int) -> int:          # runs on every rank; what it returns is pickled back
        t = torch.tensor([x]); torch.distributed.all_reduce(t); return int(t)

``run_ranks(n, fn, *args, timeout=120, **kwargs)`` returns the results in rank order. In the rank torch.distributed
is up (gloo, over a file store, no port), RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set,
Megatron is importable and patched (``platform.prepare()`` ran in the parent), torch has one thread and the
generators are seeded alike. ``process_group=False`` leaves torch.distributed to the function, as under torchrun.
Do several checks in one function, or give several to ``run_in_turn``: a fork costs 0.1 s, starting the groups 0.1 to
0.5 s, a model build little more; ``mca_models.megatron.distributed.parallel.start(layout)`` may be called again with
another layout of the same size.

If a rank fails, all are killed and ``RanksFailed`` shows the error of the first, then every rank's traceback; on a
time-out it shows where each rank stood. Ranks also die with the process that forked them. Mark such tests ``ranks``:
under pytest-xdist (``--dist loadgroup``) they then run one after the other in one worker, so that at most 8 processes
run at once.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import math
import os
import pickle
import random
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from ctypes import CDLL, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")

MAX_RANKS = 8
_PR_SET_PDEATHSIG = 1
_SEED = 1234
_FRAME = 66_000  # pointers: Python takes a piece of 1 MiB for it, of which half is left
_SAVING = "megatron.core.dist_checkpointing.strategies"
_MADV_COLLAPSE = 25
_MANY = 24
"""Ranks after which huge pages save more CPU time than they take: 1 s once, 0.01 to 0.02 s in each later rank."""
_IMPORTED = (
    *("datasets", "peft", "torch._dynamo", "mca_config.training", "mca_models.megatron.peft", "ml_dtypes"),
    *(f"{_SAVING}.torch", f"{_SAVING}.fully_parallel", "torch.utils.serialization"),
)
"""Modules that ranks import, 1 to 3 s in each of them; torch's first optimizer imports dynamo."""

_LLAMA = {
    "model_type": "llama",
    **{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
    **{"vocab_size": 8, "max_position_embeddings": 8},
}


class RanksFailed(AssertionError):
    """One or more ranks raised, died or ran out of time."""


@dataclass
class _Rank:
    """One forked process, as its parent sees it."""

    number: int
    pid: int
    pipe: int
    stacks: Path
    received: bytearray
    outcome: tuple[str, Any] | None = None
    ended: float = 0.0


@cache
def prepare_parent() -> None:
    """Imports what ranks need, once in the process that forks them, which may have imported a part of it."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["MCA_DEVICE"] = "cpu"  # also where there is a GPU: CUDA does not survive a fork
    import torch

    torch.set_num_threads(1)
    gc.disable()  # what is imported is no garbage
    from mca_models.megatron import platform

    platform.prepare()
    for name in _IMPORTED:
        importlib.import_module(name)
    import mca_train

    for name in mca_train.__all__:
        getattr(mca_train, name)  # imported when it is asked for
    _fill_caches()
    gc.freeze()
    atexit.register(gc.unfreeze)  # otherwise nanobind reports the types of its modules as leaks at the exit
    gc.enable()


def _fill_caches() -> None:
    """Compute once what is kept from a first call on: 10 to 30 ms of CPU time in each rank."""
    from torch.distributed import Backend, distributed_c10d
    from transformers.utils import is_torch_hpu_available, is_torch_mlu_available, is_torch_musa_available

    from mca_config.arguments.distributing import DistributingOptions
    from mca_config.arguments.megatron import TrainingOptions
    from mca_config.fields import type_hints
    from mca_models.megatron import platform
    from mca_models.templates import FAMILIES, config_from_hf
    from mca_train.config.early_arguments import metric_schedules

    platform.megatron_version(), platform.engine_version(), metric_schedules()
    type_hints(DistributingOptions), type_hints(TrainingOptions)
    is_torch_hpu_available(), is_torch_mlu_available(), is_torch_musa_available()
    distributed_c10d.BackendConfig(Backend("gloo"))  # looks through the entry points of all packages
    list(FAMILIES.values())  # imports their modules
    config_from_hf(_LLAMA)


def run_ranks(
    size: int,
    fn: Callable[..., Result],
    *args: Any,
    timeout: float = 120,
    process_group: bool = True,
    **kwargs: Any,
) -> list[Result]:
    """``fn(*args, **kwargs)`` on ``size`` ranks; their results in rank order.

    Raises:
        RanksFailed: A rank raised, died, or ``timeout`` seconds went by.
    """
    if not 1 <= size <= MAX_RANKS:
        raise ValueError(f"run_ranks forks 1 to {MAX_RANKS} ranks, not {size}")
    prepare_parent()
    sys.stdout.flush()
    sys.stderr.flush()
    _count_ranks(size)
    with tempfile.TemporaryDirectory(prefix="mca-ranks-") as folder:
        call = _Call(size, fn, args, kwargs, Path(folder), process_group, timeout, free_port())
        ranks = [_fork(call, number) for number in range(size)]
        try:
            _collect(ranks, time.monotonic() + timeout)
            return _results(ranks, timeout)
        finally:
            _kill(ranks)


def run_in_turn(size: int, *calls: Callable[[], Result], timeout: float = 120) -> list[list[Result]]:
    """Return the results of each call in rank order, all run on the same ``size`` ranks, each from the same seeds.

    Raises:
        RanksFailed: As `run_ranks`.
    """
    by_rank = run_ranks(size, _call_in_turn, calls, timeout=timeout)
    return [list(results) for results in zip(*by_rank, strict=True)]


def _call_in_turn(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    found = []
    for call in calls:
        _seed_generators()
        found.append(call())
    return found


_forked = [0]
"""Ranks that this process has forked."""


def _count_ranks(size: int) -> None:
    before, _forked[0] = _forked[0], _forked[0] + size
    if before < _MANY <= _forked[0]:
        _use_huge_pages()


def _use_huge_pages() -> None:
    """Move this process's memory to huge pages where Linux can (6.1): a fork copies an entry for each page."""
    madvise = CDLL(None).madvise
    madvise.argtypes = (c_void_p, c_size_t, c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, *_, inode = line.split()[:5]
        if access == "rw-p" and inode == "0" and "[stack" not in line:
            start, end = (int(address, 16) for address in addresses.split("-"))
            madvise(start, end - start, _MADV_COLLAPSE)  # what cannot be moved stays as it is


@dataclass(frozen=True)
class _Call:
    """Arguments of one ``run_ranks`` on every rank."""

    size: int
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    folder: Path
    process_group: bool
    timeout: float
    port: int


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _fork(call: _Call, number: int) -> _Rank:
    read, write = os.pipe()
    stacks = call.folder / f"stacks.{number}"
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # idle threads of libraries; torch has one thread
        pid = os.fork()
    if pid == 0:
        os.close(read)
        _rank_main(call, number, write, stacks, parent)
    os.close(write)
    return _Rank(number, pid, read, stacks, bytearray())


def _rank_main(call: _Call, number: int, pipe: int, stacks: Path, parent: int) -> None:
    """The forked process: never returns."""
    status = 1
    gc.freeze()  # what the parent left is neither looked through nor copied
    try:
        CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever pytest was started with
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with stacks.open("w") as file:
            faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
            outcome = _outcome(call, number)
        with os.fdopen(pipe, "wb") as sink:
            sink.write(_pickled(outcome))
        status = 0 if outcome[0] == "result" else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _pickled(outcome: tuple[str, Any]) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception:
        return pickle.dumps(("traceback", f"the result cannot be pickled\n{traceback.format_exc()}"))


def _outcome(call: _Call, number: int) -> tuple[str, Any]:
    try:
        _environment(call, number)
        if call.process_group:
            _start_process_group(call, number)
        return "result", _with_room(call.fn)(*call.args, **call.kwargs)
    except BaseException:
        return "traceback", traceback.format_exc()


def _with_room(fn: Callable[..., Result]) -> Callable[..., Result]:
    """``fn``, called by a function whose frame is so large that what it calls has its frames in the same piece.

    Python takes frames from pieces of 16 KiB; a loop that calls across the end of one maps and unmaps the next one
    every time: nine of ten mmaps of a rank.
    """

    def call(*args: Any, **kwargs: Any) -> Result:
        return fn(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_FRAME)
    return call


def _environment(call: _Call, number: int) -> None:
    import torch

    os.environ.update(
        RANK=str(number),
        LOCAL_RANK=str(number),
        WORLD_SIZE=str(call.size),
        LOCAL_WORLD_SIZE=str(call.size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(call.port),
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    for device in (torch.cuda, torch.xpu, torch.mtia):  # on none of them does a rank compute
        device.manual_seed_all = lambda seed: None  # notes a stack in each torch.manual_seed
    _seed_generators()


def _seed_generators() -> None:
    import numpy as np
    import torch

    random.seed(_SEED)
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)


def _start_process_group(call: _Call, number: int) -> None:
    import torch.distributed

    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{call.folder / 'store'}",
        rank=number,
        world_size=call.size,
        timeout=timedelta(seconds=call.timeout),
    )
    torch.distributed.barrier()  # a rank that leaves before another has connected would fail that one


def _collect(ranks: list[_Rank], deadline: float) -> None:
    """Reads outcomes until all ranks have ended, one has failed, or time is up."""
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.pipe, selectors.EVENT_READ, rank)
        while selector.get_map():
            ready = selector.select(max(0, deadline - time.monotonic()))
            if not ready:
                return
            for key, _ in ready:
                rank: _Rank = key.data
                if data := os.read(rank.pipe, 1 << 20):
                    rank.received += data
                    continue
                selector.unregister(rank.pipe)
                rank.ended = time.monotonic()
                rank.outcome = pickle.loads(bytes(rank.received)) if rank.received else ("died", None)
                if rank.outcome[0] != "result":
                    # the other ranks hang in a collective or fail too: a moment for their tracebacks
                    deadline = min(deadline, time.monotonic() + 1)


def _results(ranks: list[_Rank], timeout: float) -> list[Any]:
    if all(rank.outcome is not None and rank.outcome[0] == "result" for rank in ranks):
        return [rank.outcome[1] for rank in ranks if rank.outcome]
    unfinished = [rank for rank in ranks if rank.outcome is None]
    for rank in unfinished:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGUSR1)
    for _ in range(100):  # 5 s
        if all(rank.stacks.stat().st_size for rank in unfinished):
            break
        time.sleep(0.05)
    stories = [_story(rank, len(ranks), timeout) for rank in ranks]
    raise RanksFailed("\n".join([_cause(ranks, stories), *stories]))


def _cause(ranks: list[_Rank], stories: list[str]) -> str:
    """Return the error of the rank that failed first, in one line, for a list of failed tests."""
    failed = [rank for rank in ranks if rank.outcome is None or rank.outcome[0] != "result"]
    first = min(failed, key=lambda rank: rank.ended or math.inf)
    title, *said = stories[first.number].splitlines()
    raised = first.outcome is not None and first.outcome[0] == "traceback"
    errors = [line for line in said if raised and line[:1].strip()]
    return f"rank {first.number} of {len(ranks)}: {errors[-1]}" if errors else title


def _story(rank: _Rank, size: int, timeout: float) -> str:
    title = f"--- rank {rank.number} of {size}: "
    if rank.outcome is None:
        return f"{title}had not finished (limit {timeout:g} s); it stood here\n{rank.stacks.read_text()}"
    kind, value = rank.outcome
    if kind == "traceback":
        return f"{title}raised\n{value}"
    return f"{title}ended normally" if kind == "result" else f"{title}died without a word"


def _kill(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if rank.outcome is None or rank.outcome[0] != "result":
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
    for rank in ranks:
        os.close(rank.pipe)
        os.waitpid(rank.pid, 0)
