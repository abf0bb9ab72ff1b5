"""Write sharded state dicts with Megatron's fully parallel strategy, synchronously or in the background.

If one rank fails, all ranks raise the same error. ``torch_dist`` saves models with it; a trainer may save its optimizer
state with it too.
"""

import contextlib
import inspect
import json
import logging
import multiprocessing.dummy
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed

from mca_config.errors import DiskFull, McaError, RankFailed
from mca_models.megatron import platform
from mca_models.megatron.distributed import parallel
from mca_models.megatron.distributed.collectives import (
    all_gather,
    as_mca_error,
    is_disk_full,
    run_on_all_ranks,
    run_on_first_rank,
)
from mca_models.megatron.platform.checkpoint_queue import kill_children_with_parent
from mca_models.megatron.types import DcpObject, SaveRequest, ShardedState, Upstream
from mca_models.storage.atomic import write_file

logger = logging.getLogger(__name__)

METADATA: ShardedState = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
"""Content metadata: how optimizer state is sharded and named in the checkpoint."""
THREADS_UP_TO = 64 << 20
"""Bytes of a rank that threads write, as in megatron-core 0.19; to fork Megatron's writers would take longer."""


class PendingWrite:
    """State dict that Megatron's writer is writing into a folder; every method is collective.

    Made by `write_state`. The folder is complete only when ``finish`` has returned.
    """

    def __init__(self, request: SaveRequest, folder: Path, *, background: bool) -> None:
        if request.async_fn is not None:
            request = request._replace(async_fn=partial(_write_with_reason, request.async_fn))
        self._request, self._folder = request, folder
        self._process: BaseProcess | None = None
        if background:
            self._start()
        else:
            run_on_all_ranks(lambda: _run(request))

    def _start(self) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import TemporalAsyncCaller

        caller: DcpObject = TemporalAsyncCaller()
        try:
            with kill_children_with_parent():
                run_on_all_ranks(lambda: caller.schedule_async_call(self._request))
        except McaError:
            if caller.process is not None:
                caller.process.kill()
            raise
        self._process = caller.process  # None if a rank has nothing to write

    def done(self) -> bool:
        """Return whether all ranks' bytes are on disk, so that ``finish`` need not wait; the same on every rank."""
        busy = self._process is not None and self._process.is_alive()
        count = torch.tensor([int(busy)], device=platform.current_device())
        torch.distributed.all_reduce(count)
        return int(count) == 0

    def finish(self) -> None:
        """Wait for the bytes and write the index of the checkpoint.

        Raises:
            McaError: A rank could not write; all raise the same.
        """
        run_on_all_ranks(self._join)
        write_index, *_ = self._request.finalize_fns
        with _collect_errors(_filesystem_writer(), "finish") as faults:
            _raise_on_all_ranks(write_index, faults)
        run_on_first_rank(lambda: _write_format(self._folder))
        self._request = None  # releases the copies of the weights

    def _join(self) -> None:
        if self._process is None:
            return
        self._process.join()
        if code := self._process.exitcode:
            how = f"was killed by signal {-code}" if code < 0 else f"failed with status {code}"
            raise McaError(f"the process that wrote the checkpoint {how}")


def write_state(state: ShardedState, folder: Path, *, background: bool = False) -> PendingWrite:
    """Begin to write ``state`` with Megatron's fully parallel strategy; collective.

    Args:
        state: Sharded tensors and objects, and values that are equal on all ranks.
        folder: Existing, empty, and visible to every rank.
        background: Return once the tensors are copied; else once the bytes are written.

    Raises:
        McaError: A rank could not write.
    """
    from megatron.core import dist_checkpointing

    options = {"async_sharded_save": True, "content_metadata": METADATA}
    options["validate_access_integrity"] = False  # torch compares the plans on the first rank too
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
        options["async_strategy"] = "mcore"  # the default is in a separate package
    strategy = _strategy()
    with (
        suppress_writer_warnings(),
        _skip_folder_checks(),
        _collect_errors(_common_writer(), "save_common") as faults,
    ):
        made: list[SaveRequest] = []
        _raise_on_all_ranks(
            lambda: made.append(dist_checkpointing.save(state, str(folder), strategy, **options)), faults
        )
    return PendingWrite(made[0], folder, background=background)


def _strategy() -> DcpObject:
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    strategy: DcpObject = FullyParallelSaveStrategyWrapper(
        TorchDistSaveShardedStrategy("torch_dist", 1), parallel.replica_group(expert=False)
    )
    strategy.cached_distribution = False  # None: all ranks exchange and compare their shards
    return strategy


def _filesystem_writer() -> Upstream:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    return FileSystemWriterAsync


def _common_writer() -> Upstream:
    """Return the owner of ``save_common``, which writes ``common.pt``: a class in 0.16, later a module."""
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import common

    return getattr(common, "TorchCommonSaveStrategy", serialization)


class _Empty:
    """Path that looks like an empty folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def iterdir(self) -> Iterator[Path]:
        return iter(())


def _unchanged(writer: DcpObject, plan: DcpObject) -> DcpObject:
    return plan


@contextlib.contextmanager
def _skip_folder_checks() -> Iterator[None]:
    """Skip Megatron's checks that the folder exists and is empty.

    Each rank would make them on its own, so that an error would leave the others waiting in a collective.
    """
    from megatron.core.dist_checkpointing import serialization

    newer = "maybe_msc" in vars(serialization)  # since 0.19
    name, empty = ("maybe_msc", SimpleNamespace(Path=_Empty)) if newer else ("Path", _Empty)
    with (
        platform.replaced(serialization, name, empty),
        platform.replaced(_filesystem_writer(), "prepare_local_plan", _unchanged),
    ):
        yield


def _run(request: SaveRequest) -> None:
    """Write this rank's shards before returning."""
    if request.async_fn is None:
        return
    arguments = list(request.async_fn_args)
    if request.preload_fn is not None:
        arguments[1] = request.preload_fn()
    with kill_children_with_parent():
        request.async_fn(*arguments, **request.async_fn_kwargs)


@contextlib.contextmanager
def _threads_for_few_bytes(buckets: DcpObject) -> Iterator[None]:
    """Let megatron-core 0.16 write ``buckets`` in threads if they have at most `THREADS_UP_TO` bytes."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    tensors = [tensor for _, _, (_, pairs) in buckets for _, tensor in pairs]
    if sum(tensor.nbytes for tensor in tensors) > THREADS_UP_TO:
        yield
        return
    threads = SimpleNamespace(get_context=lambda method: multiprocessing.dummy)
    with platform.replaced(filesystem_async, "mp", threads):
        yield


class _Errors(logging.Handler):
    """Log handler that collects error messages."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage().partition(" an error: ")[2])


class _Outcome:
    """Receiver of the result that Megatron's writer puts into its queue."""

    def __init__(self) -> None:
        self.value: object = RuntimeError("the writer ended without a result")

    def put(self, value: object) -> None:
        self.value = value


def _write_with_reason(
    write: Callable[..., None], rank: int, buckets: DcpObject, results: "_Outcome", **options: object
) -> None:
    """Run Megatron's writer and add the reason of a failure to its result, which 0.19 only logs."""
    outcome, errors = _Outcome(), _Errors()
    logger = logging.getLogger(_filesystem_writer().__module__)
    logger.addHandler(errors)
    try:
        with _threads_for_few_bytes(buckets):
            write(rank, buckets, outcome, **options)
    except Exception as error:
        outcome.put(error)
    finally:
        logger.removeHandler(errors)
    if isinstance(outcome.value, Exception) and any(errors.texts):
        outcome.put(RuntimeError(next(filter(None, errors.texts))))
    results.put(outcome.value)


@contextlib.contextmanager
def _collect_errors(owner: Upstream, method: str) -> Iterator[list[Exception]]:
    """Collect the errors of a step that Megatron runs on one rank while the others wait in a collective.

    Raised there, they would leave the others waiting; they are appended to the yielded list instead.
    """
    faults: list[Exception] = []
    original: Upstream = getattr(owner, method, None)

    def attempt(*args: object, **kwargs: object) -> object:
        try:
            return original(*args, **kwargs)
        except Exception as error:
            faults.append(error)
            return None

    if original is None:
        yield faults
        return
    with platform.replaced(owner, method, attempt):
        yield faults


def _raise_on_all_ranks(work: Callable[[], object], faults: list[Exception]) -> None:
    """Run ``work``, which is collective, and raise on all ranks if it fails or ``faults`` is filled.

    Megatron reports the error to the first rank only.
    """
    failed: list[RankFailed] = []
    try:
        work()
    except BaseException as error:  # torch's CheckpointException is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        failed.append(_cause(error))
    failed += [RankFailed(torch.distributed.get_rank(), as_mca_error(error)) for error in faults]
    failures = [failure for by_rank in all_gather(failed) for failure in by_rank]
    if failures:
        raise failures[0]


def _cause(error: BaseException) -> RankFailed:
    """Return which rank failed, and why, from an error of torch's checkpoint writer."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (first, _) = sorted(failures.items())[0]
        why = next(iter(str(first).splitlines()), type(first).__name__).removeprefix("Worker failure: ")
        return RankFailed(rank, DiskFull(why) if is_disk_full(first) else McaError(why))
    return RankFailed(torch.distributed.get_rank(), as_mca_error(error))


def _write_format(folder: Path) -> None:
    """Write the file that Megatron writes last and that makes the folder a checkpoint."""
    from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig

    for file in folder.glob("common.pt"):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    write_file(folder / CONFIG_FNAME, json.dumps(asdict(CheckpointingConfig("torch_dist", 1))).encode())


@contextlib.contextmanager
def suppress_writer_warnings() -> Iterator[None]:
    """Suppress warnings of Megatron's writer about deprecated parts of torch and Megatron."""
    logger = logging.getLogger("megatron.core.dist_checkpointing.strategies.torch")

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger.addFilter(is_error)  # setLevel would clear the caches of all loggers, 3 ms each time
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.removeFilter(is_error)
