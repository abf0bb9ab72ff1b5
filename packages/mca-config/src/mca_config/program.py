"""A `Program`: a table of commands with their help and shell completion, the version, and exit codes."""

import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from mca_config.errors import McaError, UsageError
from mca_config.printable import printable, suggestion, terminal_width

if TYPE_CHECKING:
    from mca_config.parser import Parser


_HELP, _VERSION = ("-h", "--help"), ("-V", "--version")
SHELLS = ("bash", "zsh", "fish")
_BASH = """\
@FUNCTION@() {
    local word=${COMP_WORDS[COMP_CWORD]}
    COMPREPLY=()
    if [[ $word == --* ]]; then
        case ${COMP_WORDS[1]} in
@CASES@
        esac
    elif [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "@COMMANDS@" -- "$word"))
    fi
}
complete -o default -F @FUNCTION@ @PROGRAM@
"""


def no_flags(parser: "Parser") -> None:
    """Declare no flags."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of a program."""

    usage: str
    """Text after the name in the usage line."""
    summary: str
    """Line in the list of commands."""
    text: str = ""
    """Description in the help of the command."""
    flags: Callable[["Parser"], None] = no_flags
    """Function that declares flags and arguments."""
    notes: str = ""
    """Text below the flags."""
    examples: tuple[str, ...] = ()
    """Lines, without the program's name; one that begins with # is a comment."""
    full_help: Callable[[], str] | None = None
    """Function that returns the whole help, if it is not generated from the other fields."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """All commands of a program."""

    name: str
    """Name of the program and of its distribution."""
    text: str
    """Purpose of the program."""
    commands: Mapping[str, Command]
    """Commands by name."""
    notes: str = ""
    """Text below the commands in the general help."""
    examples: tuple[str, ...] = ()
    """Example lines, see `Command.examples`."""
    default: str = ""
    """The command for flags directly after the program's name; empty: there is none."""
    hint: Callable[[str], str] = lambda name: ""
    """Function that returns the message about an unknown flag; if empty, a similar flag is suggested."""
    no_command: str = ""
    """Message about a word that is similar to no command."""
    other_commands: Mapping[str, str] = field(default_factory=dict)
    """Messages about commands of other programs, instead of a suggestion."""

    def answer(self, words: Sequence[str]) -> str | None:
        """Return the help or version if ``words`` request it, the general help without words, else None."""
        if not words or set(_HELP) & set(words):
            name = words[0] if words else ""
            return self.command_help(name) if name in self.commands else self.help()
        if set(_VERSION) & set(words):
            from importlib.metadata import version

            return f"{self.name} {version(self.name)}\n"
        return None

    def find_command(self, words: Sequence[str]) -> tuple[str, list[str]]:
        """Return the name of the command and its words.

        Raises:
            UsageError: There is no such command.
        """
        first = words[0]
        if first in self.commands:
            return first, list(words[1:])
        if first.startswith("-") and self.default:
            return self.default, list(words)
        kind, known = (
            ("flag ", _HELP + _VERSION) if first.startswith("-") else ("command ", tuple(self.commands))
        )
        if first in self.other_commands:
            raise UsageError(f"unknown command '{first}'; {self.other_commands[first]}")
        shown = first if first.startswith("-") else f"'{first}'"
        otherwise = self.no_command or f"see {self.name} --help"
        raise UsageError(f"unknown {kind}{shown}{suggestion(first, known, otherwise)}")

    def parser(self, name: str) -> "Parser":
        """Return the parser of one command."""
        from mca_config.parser import Parser

        command = self.commands[name]
        parser = Parser(
            self._full(name),
            command.usage,
            textwrap.fill(command.text, terminal_width()),
            "\n\n".join(part for part in (command.notes, self._examples(command.examples)) if part),
            self.hint,
        )
        command.flags(parser)
        return parser

    def command_help(self, name: str) -> str:
        """Return the help of one command; the general help, which lists its flags, for the default command."""
        command = self.commands[name]
        if command.full_help is not None:
            return command.full_help()
        return self.help() if name == self.default else self.parser(name).format_help()

    def help(self) -> str:
        """Return the general help."""
        groups = groupby(self.commands, key=lambda name: self.commands[name].usage)
        usages = [f"{self._full('|'.join(names))} {usage}".rstrip() for usage, names in groups]
        parts = [
            "usage: " + "\n       ".join(usages),
            textwrap.fill(self.text, terminal_width()),
            *self._lists(),
        ]
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
                command.summary,
                terminal_width(),
                initial_indent=f"  {name:<{width}}  ",
                subsequent_indent=indent,
            )
        yield "\n".join(lines)
        yield f"`{self.name} COMMAND --help` describes a command; `{self.name} --version` prints the version."
        yield self.notes

    def _full(self, name: str) -> str:
        return self.name if name == self.default else f"{self.name} {name}"

    def _examples(self, lines: Sequence[str]) -> str:
        if not lines:
            return ""
        shown = [line if line.startswith(("#", " ")) else f"{self.name} {line}" for line in lines]
        return "\n".join(["examples:", *(f"  {line}" for line in shown)])


def fail(error: McaError) -> int:
    """Print the error and return the exit code: 2 for wrong usage, 1 for a failure."""
    sys.stderr.write(f"error: {printable(str(error))}\n")
    return 2 if isinstance(error, UsageError) else 1


def completion(program: str, shell: str, flags: Mapping[str, Sequence[str]], default: str = "") -> str:
    """Return the completion script.

    Args:
        program: Name of the program.
        shell: One of `SHELLS`.
        flags: Flags of each command, by name of the command.
        default: The command whose flags may follow ``program`` directly.

    Raises:
        UsageError: The shell is not supported.
    """
    if shell not in SHELLS:
        raise UsageError(f"{program} completion: expected one of {', '.join(SHELLS)}, not {shell!r}")
    if shell == "fish":
        return _fish(program, flags, default)
    cases = "\n".join(
        f'            {"*" if name == default else name}) COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word")) ;;'
        for name, words in sorted(flags.items(), key=lambda item: item[0] == default)
        if words
    )
    script = _BASH.replace("@COMMANDS@", " ".join(flags)).replace("@CASES@", cases)
    script = script.replace("@FUNCTION@", f"_{program.replace('-', '_')}").replace("@PROGRAM@", program)
    return ("autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "") + script


def _fish(program: str, flags: Mapping[str, Sequence[str]], default: str) -> str:
    lines = [f"complete -c {program} -n __fish_use_subcommand -a '{' '.join(flags)}'"]
    others = " ".join(name for name in flags if name != default)
    for name, words in flags.items():
        seen = (
            f"__fish_seen_subcommand_from {name}"
            if name != default
            else f"not __fish_seen_subcommand_from {others}"
        )
        lines += [f"complete -c {program} -n '{seen}' -l {word[2:]} -r" for word in words]
    return "\n".join(lines) + "\n"
