"""The command-line parser of all mca commands: `Parser` parses the words of one command, `add_flag` declares a flag.

`add_arguments` declares the flags of a dataclass, and `from_namespace` constructs it.
"""

import argparse
import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, Literal, NoReturn, TypeVar, get_args

from mca_config.errors import McaError, UsageError, raise_problems
from mca_config.fields import TypeHint, alternatives, cast, hint_origin, type_hints
from mca_config.printable import INDENT, first_line, suggestion, terminal_width
from mca_config.types import JsonObject, Typed

_SIMPLER_MESSAGES = (
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


def add_flag(container: argparse._ActionsContainer, name: str, **settings: Typed) -> None:
    """Add ``--name`` to a parser or a group of its flags.

    Args:
        container: The parser or group.
        name: With underscores; users may write hyphens.
        settings: Arguments of ``add_argument``, or ``hint``, the type of a value that is converted like one of YAML.
    """
    if "hint" in settings:
        settings["type"] = _reader(f"--{name}", settings.pop("hint"))
    spellings = dict.fromkeys(
        (f"--{name}", f"--{name.replace('_', '-')}")
    )  # both, for a parser of another class
    container.add_argument(*spellings, dest=name, **settings)


def add_operands(parser: argparse.ArgumentParser) -> None:
    """Add ``operands``, the words that are not flags; the command checks their number."""
    parser.add_argument("operands", nargs="*", help=argparse.SUPPRESS)


def _reader(name: str, hint: TypeHint) -> Callable[[str], Typed]:
    def read(text: str) -> Typed:
        try:
            return cast(name, text, hint, words=True)
        except McaError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


class Parser(argparse.ArgumentParser):
    """Parser that accepts ``-`` and ``_`` in flags, and no abbreviations or duplicates. Errors are `UsageError`.

    Args:
        prog: Program and command.
        usage: Text after ``prog`` in the usage line.
        text: Description of the command.
        ending: Text below the flags.
        hint: Function that returns the message about an unknown flag, from its name without dashes; if it returns an
            empty text, the message suggests a similar flag.
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
        """All flags, in the spelling of the help."""
        return [flag for flag in self._option_string_actions if flag == _as_declared(flag)]

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse ``words``; unknown flags are reported before missing ones.

        Raises:
            UsageError: A flag is unknown, missing, given twice, or has a wrong value.
        """
        words = [_as_declared(word) for word in words]
        self._check_flags(words)
        namespace, rest = self.parse_known_intermixed_args(words)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return namespace

    def read_known(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the values of this parser's flags and arguments among ``words``, and the words of all other flags."""
        known: list[str] = []
        unknown: list[str] = []
        target = known
        for word in map(_as_declared, words):
            if _is_flag(word):
                target = known if _flag_name(word) in self._option_string_actions else unknown
            target.append(word)
        return self.read(known), unknown

    def _check_flags(self, words: Sequence[str]) -> None:
        flags = [_flag_name(word) for word in words if _is_flag(word) or re.fullmatch(r"-[A-Za-z]\S*", word)]
        unknown = dict.fromkeys(flag for flag in flags if flag not in self._option_string_actions)
        problems = [f"unknown flag {flag}{self._unknown_flag_hint(flag)}" for flag in unknown]
        twice = dict.fromkeys(flag for flag in flags if flags.count(flag) > 1 and flag not in unknown)
        problems += [f"{flag} is given twice" for flag in twice]
        if len(problems) == 1:
            raise UsageError(problems[0])
        raise_problems(problems, self.prog, kind=UsageError)

    def _unknown_flag_hint(self, flag: str) -> str:
        hint = self._hint(flag.removeprefix("--"))
        known = self.flags if flag.startswith("--") else ()  # a letter is similar to any short word
        return hint or suggestion(flag, known, f"{self.prog} --help lists the flags")

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError` with a simpler form of argparse's ``message``.

        Raises:
            UsageError: Always.
        """
        for pattern, simpler in _SIMPLER_MESSAGES:
            message = re.sub(pattern, simpler, message)
        raise UsageError(f"{message}; see {self.prog} --help")


class _Format(argparse.RawDescriptionHelpFormatter):
    """Help formatter with each flag on a separate line above one line of meaning."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=INDENT, width=terminal_width())

    def _expand_help(self, action: argparse.Action) -> str:
        return first_line(super()._expand_help(action))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy(action)
        shown.option_strings = action.option_strings[:1]
        return super()._format_action_invocation(shown)


def _is_flag(word: str) -> bool:
    return re.match(r"--[^\s=-][^\s=]*(=|$)", word) is not None


def _flag_name(word: str) -> str:
    return word.partition("=")[0]


def _as_declared(word: str) -> str:
    if not _is_flag(word):
        return word
    flag, equals, value = word.partition("=")
    return f"--{flag[2:].replace('-', '_')}{equals}{value}"


T = TypeVar("T")


def add_arguments(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, cls: type, names: Iterable[str] | None = None
) -> None:
    """Add a flag for each field of ``cls`` (or for ``names`` of them) to a parser or argument group.

    Absent flags are not in the namespace, so that the dataclass's defaults apply. The metadata of a field may have its
    ``help`` and the placeholder of its ``value``; an empty ``value`` makes a flag without a value.
    """
    hints = type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for name in fields if names is None else names:
        settings = _flag_settings(hints[name], fields[name].metadata.get("value"))
        add_flag(
            parser, name, default=argparse.SUPPRESS, help=fields[name].metadata.get("help", ""), **settings
        )


def from_namespace(cls: type[T], namespace: argparse.Namespace) -> T:
    """Return an instance of ``cls`` from the flags on the command line."""
    names = {field.name for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in vars(namespace).items() if name in names})


def _flag_settings(hint: Any, value: str | None) -> JsonObject:
    if value == "":
        return {"action": "store_true"}
    kinds = [kind for kind in alternatives(hint) if kind is not type(None)]
    kind = str if str in kinds else kinds[0]
    if kind is bool:
        return {"hint": kind, "nargs": "?", "const": True, "metavar": value or "BOOL"}
    if hint_origin(kind) is list:
        return {"hint": get_args(kind)[0], "nargs": "+", "metavar": value or "NAME"}
    if hint_origin(kind) is Literal:
        return {"hint": kind, "metavar": value or "{" + ",".join(map(str, get_args(kind))) + "}"}
    return {"hint": kind, "metavar": value or {int: "N", float: "X"}.get(kind, "TEXT")}
