"""The ``mca-convert`` command.

Only ``argparse`` and the flags are imported here; NumPy and the rest come with the work itself.
"""

import argparse
import gc
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mca_config.errors import McaError
from mca_convert import __version__
from mca_convert.flags import DEFAULT_COMMAND, build_parser, command_of


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command, rest = command_of(arguments)
    parser = build_parser(command, __version__)
    options = parser.parse_args(rest)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the workers are threads enough
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        with no_collection():
            return _run(command, parser, options)
    except McaError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"error: {_where(error)}{error.strerror or error}\n")
        return 1
    except MemoryError:
        sys.stderr.write("error: out of memory; give fewer --workers, or a smaller --memory_limit\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing was left behind\n")
        return 130


@contextmanager
def no_collection() -> Iterator[None]:
    """Without searches for cycles: a plan of many thousand objects has none, and they cost a tenth of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _where(error: OSError) -> str:
    return f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""


def _run(command: str, parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if command == DEFAULT_COMMAND:
        from mca_convert.commands.convert import convert

        return convert(parser, options)
    if command == "verify":
        from mca_convert.commands.verify import verify

        return verify(options)
    if command == "plan":
        from mca_convert.commands.plan import plan

        return plan(parser, options)
    if command == "inspect":
        from mca_convert.commands.inspect import inspect

        return inspect(options)
    raise AssertionError(command)


if __name__ == "__main__":
    sys.exit(main())
