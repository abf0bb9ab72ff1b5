"""The one error that users see, and how it tells a wrong configuration from a failure."""

from collections.abc import Iterator
from contextlib import contextmanager


class McaError(ValueError):
    """A mistake in a user's input, told in one line.

    The message names the file, parameter or flag, what was expected and what to change. The commands
    print it as ``error: <message>`` and exit 1.

    Attributes:
        problems: Where several were found together, each of them.
    """

    problems: tuple[str, ...] = ()


class UsageError(McaError):
    """The command line or the configuration is wrong: nothing was done, and the same again fails again; exit 2."""


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
    return error if text.startswith(str(where)) else McaError(f"{where}: {text}")


def list_problems(problems: list[str], what: str) -> McaError | None:
    """Joins all ``problems`` found in ``what`` into one error; None without problems."""
    if not problems:
        return None
    count = f" {len(problems)} problems\n " if len(problems) > 1 else ""
    error = McaError(f"{what}:{count} " + "\n  ".join(problems))
    error.problems = tuple(problems)
    return error


def problems_of(error: ValueError) -> tuple[str, ...]:
    """What ``error`` says is wrong, each on one line."""
    found = error.problems if isinstance(error, McaError) else ()
    return found or (" ".join(str(error).split()),)
