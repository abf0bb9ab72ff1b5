"""Who holds up a run that hangs, from what every rank said last; pure functions of that."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath
from types import FrameType

_SHOWN = 4
_WAITING_FILES = ("p2p_communication.py", "param_and_grad_buffer.py", "stop_signal.py")
"""Where ranks wait for others by methods that are not written in Python."""
_WRAPPERS = ("wrapper", "decorate_context", "__enter__", "__exit__")


@dataclass(frozen=True)
class Sign:
    """What a rank said.

    Args:
        rank: Which.
        number: How often it has said something.
        host: Its machine.
        step: In which it is.
        what: The part of the step.
        place: The call that runs, and where in the program that is.
        waits: Whether that is a wait for other ranks.
    """

    rank: int
    number: int
    host: str
    step: int
    what: str
    place: str
    waits: bool


def doing(frame: FrameType | None) -> tuple[str, bool]:
    """What a thread does, from its innermost frame, and whether that is a wait for other ranks."""
    operation, waits = "", False
    while frame is not None and (_is_of_torch_distributed(frame) or (waits and _is_a_with_block(frame))):
        name = frame.f_code.co_name
        operation, waits = (operation if name in _WRAPPERS else name), True
        frame = frame.f_back
    if frame is None:
        return operation or "nothing", waits
    path = PurePath(frame.f_code.co_filename)
    place = f"{path.parent.name}/{path.name}:{frame.f_lineno} ({frame.f_code.co_name})"
    return (f"{operation} in {place}" if operation else place), waits or path.name in _WAITING_FILES


def _is_of_torch_distributed(frame: FrameType) -> bool:
    parts = PurePath(frame.f_code.co_filename).parts
    return ("torch", "distributed") in pairwise(parts)


def _is_a_with_block(frame: FrameType) -> bool:
    return PurePath(frame.f_code.co_filename).name == "contextlib.py"


def told(signs: Sequence[Sign | None], silent: Sequence[int]) -> str:
    """One line: the ranks that others wait for, and what those do.

    Args:
        signs: Of all ranks, in their order; None: it has not said anything.
        silent: Ranks that say nothing new.
    """
    return "; ".join(_parts(signs, silent))


def _parts(signs: Sequence[Sign | None], silent: Sequence[int]) -> Iterator[str]:
    unheard = [rank for rank, sign in enumerate(signs) if sign is None]
    if unheard:
        yield f"{_ranks(unheard)}: training has not started there"
    for sign in [sign for sign in signs if sign is not None and sign.rank in silent][:_SHOWN]:
        yield (
            f"rank {sign.rank} on {sign.host} does not report any more (it is stopped, or its machine is lost); "
            f"its last report was in {sign.what} of step {sign.step}, {sign.place}"
        )
    lively = [sign for sign in signs if sign is not None and sign.rank not in silent]
    groups: dict[tuple[int, str, bool], list[Sign]] = {}
    for sign in lively:
        groups.setdefault((sign.step, sign.place, sign.waits), []).append(sign)
    if not unheard and not silent:
        yield from _busy(groups)
    for (_, place, waits), members in groups.items():
        if waits:
            yield f"{_ranks([sign.rank for sign in members])}: waiting in {place}"


def _busy(groups: dict[tuple[int, str, bool], list[Sign]]) -> Iterator[str]:
    """Those that do not wait."""
    for members in [members for (_, _, waits), members in groups.items() if not waits][:_SHOWN]:
        first = members[0]
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        yield f"rank {first.rank} on {first.host}{more} in {first.what} of step {first.step}: {first.place}"


def _ranks(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank {names}" if len(ranks) == 1 else f"{len(ranks)} ranks ({names})"
