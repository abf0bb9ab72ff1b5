"""Report on a run that hangs, from the last heartbeat of every rank; pure functions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath
from types import FrameType

_SHOWN = 4
_WAITING_FILES = ("p2p_communication.py", "param_and_grad_buffer.py", "stop_request.py")
"""Files whose calls wait for other ranks in native code."""
_WRAPPERS = ("wrapper", "decorate_context", "__enter__", "__exit__")


@dataclass(frozen=True)
class Heartbeat:
    """Last report of a rank.

    Args:
        rank: The rank.
        number: Number of reports so far.
        host: Its machine.
        step: Its training step.
        what: Phase of the step.
        location: The running call and its source location.
        waits: True if the call waits for other ranks.
    """

    rank: int
    number: int
    host: str
    step: int
    what: str
    location: str
    waits: bool


def current_call(frame: FrameType | None) -> tuple[str, bool]:
    """Return a thread's current call, from its innermost frame, and True if it waits for other ranks."""
    operation, waits = "", False
    while frame is not None and (_is_in_torch_distributed(frame) or (waits and _is_with_block(frame))):
        name = frame.f_code.co_name
        operation, waits = (operation if name in _WRAPPERS else name), True
        frame = frame.f_back
    if frame is None:
        return operation or "nothing", waits
    path = PurePath(frame.f_code.co_filename)
    location = f"{path.parent.name}/{path.name}:{frame.f_lineno} ({frame.f_code.co_name})"
    return (f"{operation} in {location}" if operation else location), waits or path.name in _WAITING_FILES


def _is_in_torch_distributed(frame: FrameType) -> bool:
    parts = PurePath(frame.f_code.co_filename).parts
    return ("torch", "distributed") in pairwise(parts)


def _is_with_block(frame: FrameType) -> bool:
    return PurePath(frame.f_code.co_filename).name == "contextlib.py"


def describe_hang(heartbeats: Sequence[Heartbeat | None], silent: Sequence[int]) -> str:
    """Describe in one line the ranks that hold up the run and their calls.

    Args:
        heartbeats: Of all ranks, in order; None: no report yet.
        silent: Ranks that have stopped reporting.
    """
    return "; ".join(_parts(heartbeats, silent))


def _parts(heartbeats: Sequence[Heartbeat | None], silent: Sequence[int]) -> Iterator[str]:
    missing = [rank for rank, heartbeat in enumerate(heartbeats) if heartbeat is None]
    if missing:
        yield f"{_ranks(missing)}: training has not started there"
    for heartbeat in [
        heartbeat for heartbeat in heartbeats if heartbeat is not None and heartbeat.rank in silent
    ][:_SHOWN]:
        yield (
            f"rank {heartbeat.rank} on {heartbeat.host} has stopped reporting (stopped process or lost machine); "
            f"its last report was in {heartbeat.what} of step {heartbeat.step}, {heartbeat.location}"
        )
    alive = [heartbeat for heartbeat in heartbeats if heartbeat is not None and heartbeat.rank not in silent]
    groups: dict[tuple[int, str, bool], list[Heartbeat]] = {}
    for heartbeat in alive:
        groups.setdefault((heartbeat.step, heartbeat.location, heartbeat.waits), []).append(heartbeat)
    if not missing and not silent:
        yield from _busy(groups)
    for (_, location, waits), members in groups.items():
        if waits:
            yield f"{_ranks([heartbeat.rank for heartbeat in members])}: waiting in {location}"


def _busy(groups: dict[tuple[int, str, bool], list[Heartbeat]]) -> Iterator[str]:
    """Describe the ranks that do not wait."""
    for members in [members for (_, _, waits), members in groups.items() if not waits][:_SHOWN]:
        first = members[0]
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        yield f"rank {first.rank} on {first.host}{more} in {first.what} of step {first.step}: {first.location}"


def _ranks(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank {names}" if len(ranks) == 1 else f"{len(ranks)} ranks ({names})"
