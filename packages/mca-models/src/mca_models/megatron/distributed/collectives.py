"""Collectives for work that can fail: if one rank fails, all ranks raise, and no partial result stays on disk.

Only Python objects are exchanged here. Tensors use torch's collectives.
"""

import errno
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed

from mca_config.errors import DiskFull, McaError, RankFailed
from mca_models.storage.atomic import AtomicDirectory, error_at_destination

_log = logging.getLogger(__name__)
Result = TypeVar("Result")
_SHOWN = 4
"""Maximum number of ranks that an error lists for one value."""

_FULL = ("no space left on device", "pytorchstreamwriter failed", "unexpected pos", "disk quota exceeded")
"""Texts of a full disk in errors of torch's writers, which carry no errno."""


def all_gather(value: Result, group: torch.distributed.ProcessGroup | None = None) -> list[Result]:
    """Gather ``value``, any Python object, from every rank of ``group`` (None: all ranks); collective."""
    size = torch.distributed.get_world_size(group)
    values: list[Result] = [value] * size
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def require_same_arguments(method: str, **arguments: object) -> None:
    """Check that all ranks called ``method`` with the same ``arguments``, before anything is sent; collective.

    Raises:
        McaError: Names the argument and the values of all ranks, on every rank.
    """
    calls = all_gather((method, arguments))
    methods = [called for called, _ in calls]
    if set(methods) != {method}:
        raise McaError(f"ranks called different methods: {_by_rank(methods)}; call the same one on all ranks")
    for name in arguments:
        values = [repr(given[name]) for _, given in calls]
        if len(set(values)) > 1:
            raise McaError(
                f"{method}: {name} differs between ranks: {_by_rank(values)}; give all ranks the same value"
            )


def _by_rank(values: Sequence[str]) -> str:
    """Format ``values``, one per rank, each with its ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {_ranks(each)}" for value, each in ranks.items())


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    return f"ranks {shown}" + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")


def run_on_all_ranks(work: Callable[[], Result]) -> list[Result]:
    """Run ``work`` on every rank and return all results; if one rank fails, all raise its error. Collective.

    Args:
        work: Must not contain collectives: a failing rank would leave the others waiting.

    Raises:
        RankFailed: The first rank that failed, with its error.
    """
    outcomes = all_gather(_outcome(work))
    for rank, (_, failed) in enumerate(outcomes):
        if failed is not None:
            raise RankFailed(rank, failed)
    return [cast("Result", outcome) for outcome, _ in outcomes]


def _outcome(work: Callable[[], Result]) -> tuple[Result | None, McaError | None]:
    try:
        return work(), None
    except Exception as error:
        _log.debug("failed", exc_info=True)
        return None, as_mca_error(error)


def as_mca_error(error: BaseException) -> McaError:
    """Convert ``error`` to a one-line McaError: user errors unchanged, a full disk as `DiskFull`."""
    first = next(iter(str(error).splitlines()), "")
    if isinstance(error, McaError) and first:
        return error
    return (DiskFull if is_disk_full(error) else McaError)(f"{type(error).__name__}: {first}".rstrip(": "))


def disk_space_hint(error: BaseException) -> str:
    """Return the free space that a `DiskFull` in the causes of ``error`` reports, else an empty text."""
    return next((cause.room for cause in _causes(error) if isinstance(cause, DiskFull) and cause.room), "")


def is_disk_full(error: BaseException) -> bool:
    """Return whether ``error`` or one of its causes is a full disk."""
    for cause in _causes(error):
        if isinstance(cause, DiskFull):
            return True
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
    return not isinstance(error, McaError) and _mentions_full_disk(error)


def _causes(error: BaseException) -> list[BaseException]:
    """List ``error`` and its causes, each once: `run_on_first_rank_unwrapped` chains a cause to its own wrapper."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and not any(cause is known for known in causes):
        causes.append(cause)
        cause = cause.cause if isinstance(cause, RankFailed) else cause.__cause__ or cause.__context__
    return causes


def _mentions_full_disk(error: BaseException) -> bool:
    text = "".join(traceback.format_exception(error)).lower()
    return any(words in text for words in _FULL)


def run_on_first_rank(work: Callable[[], Result]) -> Result:
    """Run ``work`` on rank 0 and return its result on all ranks; if it fails, all raise. Collective.

    Raises:
        RankFailed: Rank 0 failed, with its error.
    """
    box: list[tuple[Result | None, McaError | None]] = [(None, None)]
    if torch.distributed.get_rank() == 0:
        box = [_outcome(work)]
    torch.distributed.broadcast_object_list(box, src=0)  # a gather would send it once per rank
    torch.distributed.barrier()
    result, fault = box[0]
    if fault is not None:
        raise RankFailed(0, fault)
    return cast("Result", result)


def run_on_first_rank_unwrapped(work: Callable[[], Result]) -> Result:
    """`run_on_first_rank`, but raise the error of rank 0 without naming that rank. Collective."""
    try:
        return run_on_first_rank(work)
    except RankFailed as error:
        raise error.cause from error


def run_on_all_ranks_unwrapped(work: Callable[[], Result]) -> list[Result]:
    """`run_on_all_ranks`, but raise the error of the first failed rank without naming that rank. Collective."""
    try:
        return run_on_all_ranks(work)
    except RankFailed as error:
        raise error.cause from error


class SharedDirectory:
    """Staging directory next to ``destination``: rank 0 creates it, all ranks write into it; collective.

    Args:
        destination: Final path.
        overwrite: Replace an existing ``destination``.

    Raises:
        McaError: The directory cannot be created, or a rank does not see it.
    """

    def __init__(self, destination: Path, *, overwrite: bool = False) -> None:
        self._owned: AtomicDirectory | None = None
        self._destination = destination
        self._open = True

        def make() -> str:
            self._owned = AtomicDirectory(destination, overwrite=overwrite)
            return str(self._owned.path)

        self.path = Path(run_on_first_rank_unwrapped(make))
        with self.discarded_on_error():
            run_on_all_ranks(self._see)

    def _see(self) -> None:
        if not self.path.is_dir():
            raise McaError(
                f"{self.path} does not exist here although rank 0 created it; all ranks must see the same file system"
            )

    def publish(self) -> None:
        """Rename it to ``destination`` once every rank has written and synced its files. Collective."""
        with self.discarded_on_error():
            run_on_first_rank(lambda: self._owned.publish() if self._owned else None)
        self._open = False

    def discard(self) -> None:
        """Remove it, unless it is published."""
        if self._owned is not None and self._open:
            self._owned.discard()
        self._open = False

    @contextmanager
    def discarded_on_error(self) -> Iterator[Path]:
        """Yield the path; on an error remove the directory and name files as in ``destination``."""
        try:
            yield self.path
        except RankFailed as error:
            self.discard()
            if (cause := error_at_destination(error.cause, self.path, self._destination)) is not None:
                raise RankFailed(error.rank, cause) from error
            raise
        except BaseException:
            self.discard()
            raise


@contextmanager
def shared_directory(destination: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield the path of a `SharedDirectory` that is published when the block ends on every rank."""
    shared = SharedDirectory(destination, overwrite=overwrite)
    with shared.discarded_on_error() as path:
        yield path
    shared.publish()
