"""The one error that users see."""


class McaError(ValueError):
    """A mistake in a user's input, told in one line.

    The message names the file, parameter or flag, what was expected and what to change. The commands
    print it as ``error: <message>`` and exit 1.
    """


def list_problems(problems: list[str], what: str) -> McaError | None:
    """Joins all ``problems`` found in ``what`` into one error; None without problems."""
    if not problems:
        return None
    if len(problems) == 1:
        return McaError(f"{what}: {problems[0]}")
    return McaError("\n  ".join([f"{what}: {len(problems)} problems", *problems]))
