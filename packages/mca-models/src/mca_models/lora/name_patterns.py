"""Regular expressions of an adapter's configuration, matched so that they end.

What a match means for an adapter is said in `config`.
"""

import re
import time
from collections.abc import Callable

from mca_config.errors import McaError

_LONGEST = 20_000
_SECONDS = 20.0
_MOST_REPEATS = 6


class PatternMatcher:
    """Matcher of patterns against names of modules, for a bounded time in all."""

    def __init__(self) -> None:
        self._left = _SECONDS

    def fullmatch(self, pattern: str, name: str) -> bool:
        """Return whether ``pattern`` matches all of ``name``."""
        return self._timed(pattern, lambda: re.fullmatch(pattern, name)) is not None

    def match(self, pattern: str, name: str) -> "re.Match[str] | None":
        """Match ``pattern`` at the beginning of ``name``."""
        return self._timed(pattern, lambda: re.match(pattern, name))

    def _timed(self, pattern: str, match: "Callable[[], re.Match[str] | None]") -> "re.Match[str] | None":
        started = time.thread_time()
        found = match()
        self._left -= time.thread_time() - started
        if self._left < 0:
            raise McaError(f"the pattern {pattern!r:.200} takes too long to match; name the modules instead")
        return found


def pattern_fault(pattern: str) -> str | None:
    """Return why ``pattern`` is rejected; None if it is not."""
    if len(pattern) > _LONGEST:
        return f"has {len(pattern)} characters, more than {_LONGEST}"
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"is no regular expression ({error})"
    repeats, nested = _repeats(pattern)
    if repeats > _MOST_REPEATS:
        return f"repeats at {repeats} places, more than {_MOST_REPEATS}, which may take for ever to match"
    if nested:
        return "repeats a group that itself repeats or chooses, which may take for ever to match"
    return None


def _repeats(pattern: str) -> tuple[int, bool]:
    """Count the repeats of an alternative; also return whether a repeated group holds a repeat or a choice.

    Alternatives are tried one after the other, each in a time that grows with the name's length to the power of the
    first, and exponentially with the second.
    """
    varies, at, repeats, most, nested = [False], 0, 0, 0, False
    while at < len(pattern):
        letter = pattern[at]
        if letter == "\\":
            at += 1
        elif letter == "[":
            at = _class_end(pattern, at)
        elif letter == "(":
            varies.append(False)
            at += pattern.startswith("(?", at)  # that question mark repeats nothing
        elif letter == ")":
            inner = varies.pop()
            nested |= inner and pattern[at + 1 : at + 2] in ("*", "+", "{")
            varies[-1] |= inner
        elif letter in "*+?{|":
            varies[-1] = True
            repeats += letter in "*+{"
            most = max(most, repeats)
            repeats = 0 if letter == "|" and len(varies) == 1 else repeats
        at += 1
    return most, nested


def _class_end(pattern: str, at: int) -> int:
    """Return the end of the set of characters that begins at ``at``."""
    at += 2 if pattern.startswith("^", at + 1) else 1
    at += pattern.startswith("]", at)  # as its first character it is one of them
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at
