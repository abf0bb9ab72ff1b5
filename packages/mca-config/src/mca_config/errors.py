"""The errors that users see, all subclasses of `McaError`, and functions that join several problems into one error."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

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


class Origin(str):
    """Name of a configuration's file and command line in errors.

    Attributes:
        flags: Keys that the command line sets.
        sources: Prefix of a problem by the key with which it begins: the file or ``--``; empty without flags.
    """

    flags: frozenset[str] = frozenset()
    sources: Mapping[str, str] = MappingProxyType({})

    def locate(self, problem: str) -> str:
        """Return ``problem`` with the source of the key with which it begins, if that is known."""
        key = re.match(r"\w*", problem)
        return self.sources.get(key[0] if key else "", "") + problem


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
    located = tuple(redacted(where.locate(line)) for line in lines) if isinstance(where, Origin) else lines
    if len(lines) == 1:
        is_located = located != lines
        error = kind(located[0] if is_located else str(with_location(McaError(lines[0]), where)))
    else:
        more = [f"and {len(lines) - shown} more"] if shown and len(lines) > shown else []
        error = kind("\n  ".join([f"{where}: {len(lines)} problems", *located[:shown], *more]))
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
