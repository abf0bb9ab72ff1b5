"""The errors that users see, all subclasses of `McaError`, and functions that join several problems into one error."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from mca_config.redaction import redacted


class McaError(ValueError):
    """A mistake in a user's input, reported in one line.

    The message names the file, parameter or flag, the expected value, and the fix. Secrets in it are redacted. The
    commands print it as ``error: <message>`` and exit with 1.

    Attributes:
        problems: The single problems, if the error reports several.
    """

    problems: tuple[str, ...] = ()

    def __init__(self, *args: object) -> None:
        super().__init__(*(redacted(arg) if isinstance(arg, str) else arg for arg in args))


class UsageError(McaError):
    """A wrong command line or configuration: nothing was done, and a retry fails too; exit code 2."""


class DiskFull(McaError):
    """A file that cannot be written because the disk, or the user's quota, is full.

    Attributes:
        room: Text with the size of the file and the free space, if both are known.
    """

    room: str = ""


class HfConfigError(McaError):
    """A ``config.json`` with values that are not supported; the message begins with the name of the file."""


class RankFailed(McaError):
    """A failure of one rank in a collective operation; every rank raises it.

    Args:
        rank: The first rank that failed.
        cause: Its error.
    """

    def __init__(self, rank: int, cause: McaError) -> None:
        super().__init__(rank, cause)  # pickle passes these to the constructor
        self.rank, self.cause = rank, cause

    def __str__(self) -> str:
        return f"rank {self.rank} could not save: {next(iter(str(self.cause).splitlines()), '')}"


@contextmanager
def raising_usage_errors() -> Iterator[None]:
    """Convert every `McaError` of the block to a `UsageError`; for blocks that only check the user's input."""
    try:
        yield
    except UsageError:
        raise
    except McaError as error:
        raise UsageError(str(error)) from None  # a traceback would show the same text twice


def with_location(error: McaError, where: object) -> McaError:
    """Return ``error`` with ``where``, usually its file, in front, unless its message begins with that."""
    text = str(error)
    return error if text.startswith(redacted(str(where))) else McaError(f"{where}: {text}")


def raise_problems(
    problems: Iterable[str], where: object, *, shown: int | None = None, kind: type[McaError] = McaError
) -> None:
    """Raise one error with all problems; return if there are none.

    Args:
        problems: One line each.
        where: The file, command or arguments with the problems; not repeated before a single problem that begins
            with it.
        shown: Largest number of problems in the message, which then counts the rest.
        kind: Class of the error.

    Raises:
        McaError: There is a problem.
    """
    lines = tuple(map(redacted, problems))
    if not lines:
        return
    if len(lines) == 1:
        error = kind(str(with_location(McaError(lines[0]), where)))
    else:
        more = [f"and {len(lines) - shown} more"] if shown and len(lines) > shown else []
        error = kind("\n  ".join([f"{where}: {len(lines)} problems", *lines[:shown], *more]))
    error.problems = lines
    raise error


def list_problems(error: ValueError) -> tuple[str, ...]:
    """Return the problems that ``error`` reports, one line each."""
    problems = error.problems if isinstance(error, McaError) else ()
    return problems or (redacted(" ".join(str(error).split())),)


def raised_problems(check: Callable[..., object], *arguments: object) -> Iterator[str]:
    """Yield the problems of the `McaError` that ``check`` raises."""
    try:
        check(*arguments)
    except McaError as error:
        yield from list_problems(error)
