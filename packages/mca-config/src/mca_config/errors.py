"""The errors that users see, all below `McaError`, and how problems are collected into one.

A class of its own has what a caller must tell from other errors; nothing here prints or chooses exit codes.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from mca_config.redaction import redacted


class McaError(ValueError):
    """A mistake in a user's input, reported in one line.

    The message names the file, parameter or flag, what was expected and what to change. It is redacted. The commands
    print it as ``error: <message>`` and exit 1.

    Attributes:
        problems: Where several were found together, each of them.
    """

    problems: tuple[str, ...] = ()

    def __init__(self, *args: object) -> None:
        super().__init__(*(redacted(each) if isinstance(each, str) else each for each in args))


class UsageError(McaError):
    """The command line or the configuration is wrong: nothing was done, and the same again fails again; exit 2."""


class DiskFull(McaError):
    """A file cannot be written, because its disk or the user's share of it has no room left.

    Attributes:
        room: The size of the file and the room for it, in words, where both are known.
    """

    room: str = ""


class HfConfigError(McaError):
    """A ``config.json`` says what cannot be represented; the text begins with the bare name of the file."""


class RankFailed(McaError):
    """Work that all ranks do together failed on one of them; every rank raises it.

    Args:
        rank: The first one that failed.
        cause: Why.
    """

    def __init__(self, rank: int, cause: McaError) -> None:
        super().__init__(rank, cause)  # what pickle makes it from
        self.rank, self.cause = rank, cause

    def __str__(self) -> str:
        return f"rank {self.rank} could not save: {next(iter(str(self.cause).splitlines()), '')}"


@contextmanager
def checking_usage() -> Iterator[None]:
    """A block that only looks at what the user asked for: what it refuses is a `UsageError`."""
    try:
        yield
    except UsageError:
        raise
    except McaError as error:
        raise UsageError(str(error)) from error


def named(error: McaError, where: object) -> McaError:
    """``error`` with the file that it is about, if it does not begin with that."""
    text = str(error)
    return error if text.startswith(redacted(str(where))) else McaError(f"{where}: {text}")


def raise_problems(
    problems: Iterable[str], what: object, *, shown: int | None = None, kind: type[McaError] = McaError
) -> None:
    """Raises one error with all problems; does nothing without any.

    Args:
        problems: What is wrong, a line each.
        what: Where it was found; it is not repeated before a single problem that begins with it.
        shown: Name only this many of them, and say how many more there are.
        kind: Of the error.

    Raises:
        McaError: There is a problem.
    """
    found = tuple(map(redacted, problems))
    if not found:
        return
    if len(found) == 1:
        error = kind(str(named(McaError(found[0]), what)))
    else:
        more = [f"and {len(found) - shown} more"] if shown and len(found) > shown else []
        error = kind("\n  ".join([f"{what}: {len(found)} problems", *found[:shown], *more]))
    error.problems = found
    raise error


def problems_of(error: ValueError) -> tuple[str, ...]:
    """What ``error`` says is wrong, each on one line."""
    found = error.problems if isinstance(error, McaError) else ()
    return found or (redacted(" ".join(str(error).split())),)
