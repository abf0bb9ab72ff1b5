"""Ranks that write together: when one fails, all say so at once, and nothing stays where the result would be."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed

from mca_config.errors import McaError
from mca_models.storage.atomic import PartialDirectory

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


def all_gather(value: Any) -> list[Any]:
    """``value`` of every rank."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def together(work: Callable[[], Result]) -> list[Result]:
    """What ``work`` returns on every rank; if it fails on one, all raise its error. Collective.

    Args:
        work: Without collectives in it: a rank that fails would leave the others waiting.

    Raises:
        McaError: Names the first rank that failed, and why.
    """
    result: Result | None = None
    fault: str | None = None
    try:
        result = work()
    except Exception as error:
        _log.debug("failed", exc_info=True)
        fault = reason(error)
    outcomes = all_gather((result, fault))
    for rank, (_, failed) in enumerate(outcomes):
        if failed is not None:
            raise McaError(f"rank {rank} could not save: {failed}")
    return [outcome for outcome, _ in outcomes]


def reason(error: BaseException) -> str:
    """Why something failed, in one line."""
    first = next(iter(str(error).splitlines()), "")
    return first if isinstance(error, McaError) and first else f"{type(error).__name__}: {first}".rstrip(": ")


def on_first(work: Callable[[], object]) -> None:
    """Runs ``work`` on rank 0; if it fails, all raise. Collective."""
    together(work if torch.distributed.get_rank() == 0 else lambda: None)


class SharedDirectory:
    """A directory beside its destination that rank 0 owns and all ranks write into; collective.

    Args:
        destination: What it becomes when it is published.
        overwrite: Replaces what stands there.

    Raises:
        McaError: It cannot be made, or a rank does not see it.
    """

    def __init__(self, destination: Path, *, overwrite: bool = False) -> None:
        self._owned: PartialDirectory | None = None
        self._open = True

        def make() -> str | None:
            if torch.distributed.get_rank() != 0:
                return None
            self._owned = PartialDirectory(destination, overwrite=overwrite)
            return str(self._owned.path)

        self.path = Path(str(self._made(make)))
        with self.discarded_on_error():
            together(self._see)

    @staticmethod
    def _made(make: Callable[[], str | None]) -> str | None:
        try:
            return together(make)[0]
        except McaError as error:
            raise McaError(str(error).removeprefix("rank 0 could not save: ")) from None

    def _see(self) -> None:
        if not self.path.is_dir():
            raise McaError(
                f"{self.path} is not there, though rank 0 made it; all ranks must see one file system"
            )

    def publish(self) -> None:
        """Puts it in place; every rank has written and synced its files. Collective."""
        with self.discarded_on_error():
            on_first(lambda: self._owned.publish() if self._owned else None)
        self._open = False

    def discard(self) -> None:
        """Removes it, unless it is published."""
        if self._owned is not None and self._open:
            self._owned.discard()
        self._open = False

    @contextmanager
    def discarded_on_error(self) -> Iterator[Path]:
        """Its path; an error inside the block removes it."""
        try:
            yield self.path
        except BaseException:
            self.discard()
            raise


@contextmanager
def shared_directory(destination: Path, *, overwrite: bool) -> Iterator[Path]:
    """A `SharedDirectory` that is published when the block ends on every rank."""
    shared = SharedDirectory(destination, overwrite=overwrite)
    with shared.discarded_on_error() as path:
        yield path
    shared.publish()
