"""`Parser` reads the words of one command, and `add_flag` declares a flag: for all commands of mca alike.

What flags a command has, and what they mean, is said by the command.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from copy import copy
from typing import NoReturn

from mca_config.errors import McaError, UsageError, raise_problems
from mca_config.fields import TypeHint, cast
from mca_config.suggestions import suggestion
from mca_config.types import Typed

_WIDTH = 90
_PLAINER = (
    (r"(--\w+)/--[\w-]+", r"\1"),
    (r"^argument (?=--)", ""),
    (r"^(\S+): not allowed with argument (\S+)$", r"\1 excludes \2"),
    (r"^(\S+): expected one argument$", r"\1 needs a value"),
    (r"^(\S+): expected at least one argument$", r"\1 needs a value"),
    (r"^(\S+): ignored explicit argument (.*)$", r"\1 takes no value, not \2"),
    (r"^(--\w+): (?=\1 )", ""),
    (r"^the following arguments are required: ", "missing "),
    (r"^unrecognized arguments: (\S+).*", r"unexpected argument '\1'"),
)


def add_flag(container: argparse._ActionsContainer, name: str, **how: Typed) -> None:
    """Adds ``--name`` to a parser or a group of its flags.

    Args:
        container: The parser or group.
        name: With underscores; users may write hyphens.
        how: As ``add_argument`` takes it, or ``hint``, the type of a value that is read as one of a YAML file is.
    """
    if "hint" in how:
        how["type"] = _reader(f"--{name}", how.pop("hint"))
    spellings = dict.fromkeys(
        (f"--{name}", f"--{name.replace('_', '-')}")
    )  # both, for a parser that is not ours
    container.add_argument(*spellings, dest=name, **how)


def add_operands(parser: argparse.ArgumentParser) -> None:
    """Words that are no flags, as ``operands``; the usage says how many are wanted, the command counts them."""
    parser.add_argument("operands", nargs="*", help=argparse.SUPPRESS)


def _reader(name: str, hint: TypeHint) -> Callable[[str], Typed]:
    def read(text: str) -> Typed:
        try:
            return cast(name, text, hint, words=True)
        except McaError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


class Parser(argparse.ArgumentParser):
    """Flags with ``-`` or ``_`` alike, none abbreviated and none given twice. All that is wrong is a `UsageError`.

    Args:
        prog: The command, with its program's name.
        usage: What follows it.
        text: What the command does.
        ending: What stands below the flags.
        hint: What to say of an unknown flag, from its name without dashes; an empty text: which flag it resembles.
    """

    def __init__(
        self,
        prog: str,
        usage: str = "",
        text: str = "",
        ending: str = "",
        hint: Callable[[str], str] = lambda name: "",
    ) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} {usage}".rstrip().replace("%", "%%"),
            description=text,
            epilog=ending,
            formatter_class=_Format,
            add_help=False,
            allow_abbrev=False,
        )
        self._hint = hint
        self._positionals.title, self._optionals.title = "arguments", "flags"

    @property
    def flags(self) -> list[str]:
        """All flags, as help spells them."""
        return [flag for flag in self._option_string_actions if flag == _as_declared(flag)]

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """The values of ``words``; unknown flags are named before anything that is missing.

        Raises:
            UsageError: A flag is unknown, missing, given twice, or has a wrong value.
        """
        words = [_as_declared(word) for word in words]
        self._refuse(words)
        found, rest = self.parse_known_intermixed_args(words)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found

    def read_own(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """The values of this parser's flags and arguments among ``words``, and the words of all other flags."""
        mine: list[str] = []
        others: list[str] = []
        target = mine
        for word in map(_as_declared, words):
            if _is_flag(word):
                target = mine if _flag_of(word) in self._option_string_actions else others
            target.append(word)
        return self.read(mine), others

    def _refuse(self, words: Sequence[str]) -> None:
        flags = [_flag_of(word) for word in words if _is_flag(word)]
        unknown = dict.fromkeys(flag for flag in flags if flag not in self._option_string_actions)
        problems = [f"unknown flag {flag}{self._ending_of(flag)}" for flag in unknown]
        twice = dict.fromkeys(flag for flag in flags if flags.count(flag) > 1 and flag not in unknown)
        problems += [f"{flag} is given twice" for flag in twice]
        if len(problems) == 1:
            raise UsageError(problems[0])
        raise_problems(problems, self.prog, kind=UsageError)

    def _ending_of(self, flag: str) -> str:
        hint = self._hint(flag.removeprefix("--"))
        return hint or suggestion(flag, self.flags, f"{self.prog} --help lists the flags")

    def error(self, message: str) -> NoReturn:
        """Refuses the words.

        Raises:
            UsageError: Always.
        """
        for pattern, plain in _PLAINER:
            message = re.sub(pattern, plain, message)
        raise UsageError(f"{message}; see {self.prog} --help")


class _Format(argparse.RawDescriptionHelpFormatter):
    """Each flag on a line of its own, its meaning below it; the same in every terminal."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=8, width=_WIDTH + 2)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy(action)
        shown.option_strings = action.option_strings[:1]
        return super()._format_action_invocation(shown)


def _is_flag(word: str) -> bool:
    return re.match(r"--[^\s=-][^\s=]*(=|$)", word) is not None


def _flag_of(word: str) -> str:
    return word.partition("=")[0]


def _as_declared(word: str) -> str:
    if not _is_flag(word):
        return word
    flag, equals, value = word.partition("=")
    return f"--{flag[2:].replace('-', '_')}{equals}{value}"
