"""The ``mca-train`` command: selection of the sub-command, and exit codes.

It imports no torch; ``reference.program`` describes the commands, ``run`` executes them.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mca_config.errors import McaError, UsageError, raise_problems
from mca_config.program import Program, fail
from mca_config.streams import safe_streams
from mca_config.types import Values
from mca_train.launch.failures import Stopped
from mca_train.reference.program import program
from mca_train.tasks import TASKS
from mca_train.tasks.task import Task

if TYPE_CHECKING:
    from argparse import Namespace
_REQUIRED_KEYS = {command: {"output_dir": "unwritten"} for command in ("data", "tokenize")}
"""Values of required keys that a command does not use."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code: 0, 1 for a failure, 2 for wrong usage."""
    words = sys.argv[1:] if arguments is None else arguments
    with safe_streams(to_the_end=arguments is None, output_too=True):
        code = _main(words)
        lost = bool(getattr(sys.stdout, "failed", False)) and words[:1] not in [[name] for name in TASKS]
        return code or int(lost)  # training also writes its output to the log


def _main(words: list[str]) -> int:
    try:
        known = program()
        answer = known.answer(words)
        if answer is None:
            return _run(known, words)
        sys.stdout.write(answer)
        return 0 if words else 2
    except McaError as error:
        return fail(error)
    except KeyboardInterrupt:
        sys.stderr.write("stopped by SIGINT\n")
        return 130
    except Stopped as stop:
        sys.stderr.write(f"{stop}\n")
        return stop.code


def _run(known: Program, words: list[str]) -> int:
    _reject_file(known, words[0])
    command, words = known.find_command(words)
    if command in ("init", "schema", "completion"):
        return _about_keys(command, known.parser(command).read(words).operands)
    if command == "client":
        return _print_client_path(known.parser(command).read(words).operands)
    if command == "report":
        return _report(known.parser(command).read(words))
    parser = known.parser(command)
    options, overrides = parser.read_known(words)
    if command == "plan":
        _check_device(options)
    usage = known.commands[command].usage
    kind, config = _kind_and_file(command, usage, options.operands, parser.flags, overrides)
    from mca_train.launch.environment import one_thread_until_forked, started_by_launcher
    from mca_train.run.settings import load_values

    values, where = load_values(config, overrides)
    values = {**_REQUIRED_KEYS.get(command, {}), **values}
    is_rank = started_by_launcher() and command != "plan"
    if not is_rank:
        one_thread_until_forked()  # before torch is imported below
    fails = _fails_on_first_rank if is_rank else _fails_before_imports
    if "torch" not in sys.modules and fails(command, kind, values, where, options):
        return 2
    if command == "tokenize":
        from mca_train.run.data_commands import tokenize

        return tokenize(values, where, options.output_prefix)
    if command == "data":
        from mca_train.run.data_commands import print_data

        return print_data(kind, values, where)
    if command == "plan" or kind is None:
        from mca_config.parser import from_namespace
        from mca_train.plan.options import PlanOptions
        from mca_train.run.plan_command import print_plan

        return print_plan(kind, values, where, from_namespace(PlanOptions, options))
    from mca_train.run.train import run

    again = [sys.executable, "-m", "mca_train", command, *words]
    return run(kind, values, where, again)


def _reject_file(known: Program, word: str) -> None:
    """Raise a `UsageError` if ``word`` is a configuration file in place of a command."""
    path = Path(word)
    if word not in known.commands and path.suffix in (".yaml", ".yml") and path.is_file():
        raise UsageError(f"name the kind of run first: mca-train KIND {word} (KIND: {', '.join(TASKS)})")


def _check_device(options: "Namespace") -> None:
    """Raise a `UsageError` for an unknown device of a plan, before a missing file is reported."""
    from mca_config.parser import from_namespace
    from mca_train.plan.hardware import load_hardware
    from mca_train.plan.options import PlanOptions

    chosen = from_namespace(PlanOptions, options)
    if chosen.device is not None:
        load_hardware(chosen.device, chosen.hardware)


def _fails_on_first_rank(
    command: str, kind: Task | None, values: Values, where: str, options: "Namespace"
) -> bool:
    """Check a run on rank 0 of torchrun or another launcher; all ranks check it again after the imports.

    Returns:
        False, because mistakes are raised.
    """
    from mca_train.launch.environment import LISTENER, is_first
    from mca_train.run.settings import check_run

    is_checked = LISTENER in os.environ  # by mca-train, before it started the rank
    if is_first() and not is_checked and kind is not None and command == kind.name:
        check_run(kind, values, where, launched=True)
    return False


def _fails_before_imports(
    command: str, kind: Task | None, values: Values, where: str, options: "Namespace"
) -> bool:
    """Report wrong keys and missing files at once, not after the imports of the command, which take seconds.

    Returns:
        True if the plan of an impossible run has been printed; other problems are raised.
    """
    from mca_config.parser import from_namespace
    from mca_train.plan.options import PlanOptions
    from mca_train.run import settings

    if command == "tokenize":
        settings.check_tokenize(values, where)
    elif command == "data":
        settings.check_data(kind, values, where)
    elif command == "plan" or kind is None:
        chosen = from_namespace(PlanOptions, options)
        problems = settings.plan_problems(kind, values, where, chosen)
        sys.stdout.write(chosen.render_impossible(problems) if problems else "")
        if problems:
            return True
    else:
        settings.check_run(kind, values, where)
        return False
    if sys.stderr.isatty():
        sys.stderr.write("loading torch and transformers ...\n")
    return False


def _kind_and_file(
    command: str, usage: str, operands: list[str], flags: list[str], overrides: list[str]
) -> tuple[Task | None, Path | None]:
    """Return the kind of run, if one is named, and the configuration file, which flags can replace.

    Raises:
        UsageError: There is neither a file nor a flag, or there are two files, or a flag is unknown.
    """
    kind = TASKS.get(command)
    if command in ("plan", "data") and operands and not Path(operands[0]).is_file():
        if operands[0] in TASKS or len(operands) > 1:
            from mca_train.reference.commands import parse_kind

            kind, operands = parse_kind(operands[0]), operands[1:]
    if not operands:
        problems = _unknown(kind, flags, overrides)
        if not overrides:
            from mca_train.reference.keys import REQUIRED

            example = (
                f"mca-train {command} {usage.partition(' [--key')[0].replace('[CONFIG.yaml]', 'CONFIG.yaml')}"
            )
            required = ", ".join(f"--{name}" for name in REQUIRED)
            problems.append(
                f"mca-train {command} needs a configuration file ({example}) or flags ({required})"
            )
        if problems:
            raise_problems(problems, f"mca-train {command}", kind=UsageError)
        return kind, None
    if len(operands) > 1:
        raise UsageError(f"unexpected argument '{operands[1]}'; overrides look like --key value")
    return kind, Path(operands[0])


def _unknown(kind: Task | None, flags: list[str], overrides: list[str]) -> list[str]:
    """Return the problems with the flags of a command line without a file."""
    if not overrides:
        return []
    from mca_train.reference.keys import unknown_flags

    return unknown_flags(TASKS.values() if kind is None else [kind], flags, overrides)


def _about_keys(command: str, words: list[str]) -> int:
    from mca_train.reference import commands

    if command == "init":
        return commands.write_starter(words)
    if command == "schema":
        return commands.print_schema(words)
    return commands.print_completion(words)


def _print_client_path(words: list[str]) -> int:
    from mca_train.clients import client_path

    if len(words) != 1:
        raise UsageError("mca-train client needs a name: mcore_adapter (for LLaMA-Factory) or roll")
    sys.stdout.write(f"{client_path(words[0])}\n")
    return 0


def _report(options: "Namespace") -> int:
    from mca_train.report import write_report

    if len(options.operands) != 1:
        raise UsageError(
            "mca-train report needs the output_dir of one run: mca-train report RUN_DIR [--compare OTHER_DIR]"
        )
    (folder,) = map(Path, options.operands)
    return write_report(folder, compare=options.compare, output=options.output, json=options.json)


if __name__ == "__main__":
    sys.exit(main())
