"""A `Program` is a table of commands: which one is meant, its help, the version, completion, and what errors end with.

What a command does is its own program's affair.
"""

import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mca_config.errors import McaError, UsageError
from mca_config.printable import printable
from mca_config.suggestions import suggestion

if TYPE_CHECKING:
    from mca_config.parser import Parser

_WIDTH = 90
_HELP, _VERSION = ("-h", "--help"), ("-V", "--version")


def no_flags(parser: "Parser") -> None:
    """The flags of a command that has none."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of a program."""

    usage: str
    """What follows its name."""
    summary: str
    """Its line in the list of commands."""
    text: str = ""
    """What it does, in its own help."""
    flags: Callable[["Parser"], None] = no_flags
    """Declares its flags and arguments."""
    notes: str = ""
    """What stands below its flags."""
    examples: tuple[str, ...] = ()
    """Lines, without the program's name; one that begins with # explains those below it."""
    whole_help: Callable[[], str] | None = None
    """Its help, where that is not made from the rest."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """All commands of a program."""

    name: str
    """Of the command, and of the distribution whose version it has."""
    text: str
    """What it is for."""
    commands: Mapping[str, Command]
    """By name."""
    notes: str = ""
    """What stands below the commands in the general help."""
    examples: tuple[str, ...] = ()
    """As those of a command."""
    default: str = ""
    """The command that is meant where flags follow the program's name; empty: there is none."""
    hint: Callable[[str], str] = lambda name: ""
    """What to say of an unknown flag before looking for one that resembles it."""
    no_command: str = ""
    """What to say of a word that resembles no command."""

    def answer(self, words: Sequence[str]) -> str | None:
        """The help or version that ``words`` ask for, without words the general help; None: they ask for neither."""
        if not words or set(_HELP) & set(words):
            name = words[0] if words else ""
            return self.help_of(name) if name in self.commands else self.help()
        if set(_VERSION) & set(words):
            from importlib.metadata import version

            return f"{self.name} {version(self.name)}\n"
        return None

    def command_of(self, words: Sequence[str]) -> tuple[str, list[str]]:
        """The command that is meant, and its own words.

        Raises:
            UsageError: There is no such command.
        """
        first = words[0]
        if first in self.commands:
            return first, list(words[1:])
        if first.startswith("-") and self.default:
            return self.default, list(words)
        what, known = (
            ("flag ", _HELP + _VERSION) if first.startswith("-") else ("command ", tuple(self.commands))
        )
        shown = first if first.startswith("-") else f"'{first}'"
        otherwise = self.no_command or f"see {self.name} --help"
        raise UsageError(f"unknown {what}{shown}{suggestion(first, known, otherwise)}")

    def parser(self, name: str) -> "Parser":
        """The parser of one command."""
        from mca_config.parser import Parser

        command = self.commands[name]
        parser = Parser(
            self._full(name),
            command.usage,
            textwrap.fill(command.text, _WIDTH),
            "\n\n".join(part for part in (command.notes, self._examples(command.examples)) if part),
            self.hint,
        )
        command.flags(parser)
        return parser

    def help_of(self, name: str) -> str:
        """The help of one command; of the default one the general help, which has its flags."""
        command = self.commands[name]
        if command.whole_help is not None:
            return command.whole_help()
        return self.help() if name == self.default else self.parser(name).format_help()

    def help(self) -> str:
        """The general help."""
        usages = [f"{self._full(name)} {command.usage}".rstrip() for name, command in self.commands.items()]
        parts = ["usage: " + "\n       ".join(usages), textwrap.fill(self.text, _WIDTH), *self._lists()]
        if self.default:
            flags = self.parser(self.default).format_help().partition("\nflags:\n")[2]
            parts.append(f"flags of {self._full(self.default)}:\n{flags}")
        elif self.examples:
            parts.append(self._examples(self.examples))
        return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"

    def _lists(self) -> Iterator[str]:
        width = max(map(len, self.commands))
        lines = ["commands:"]
        for name, command in self.commands.items():
            indent = " " * (width + 4)
            lines += textwrap.wrap(
                command.summary, _WIDTH, initial_indent=f"  {name:<{width}}  ", subsequent_indent=indent
            )
        yield "\n".join(lines)
        yield f"`{self.name} COMMAND --help` says more about a command; `{self.name} --version` prints the version."
        yield self.notes

    def _full(self, name: str) -> str:
        return self.name if name == self.default else f"{self.name} {name}"

    def _examples(self, lines: Sequence[str]) -> str:
        if not lines:
            return ""
        shown = [line if line.startswith(("#", " ")) else f"{self.name} {line}" for line in lines]
        return "\n".join(["examples:", *(f"  {line}" for line in shown)])


def fail(error: McaError) -> int:
    """Prints the error; the exit code: 2 for wrong usage, 1 for a failure."""
    sys.stderr.write(f"error: {printable(str(error))}\n")
    return 2 if isinstance(error, UsageError) else 1
