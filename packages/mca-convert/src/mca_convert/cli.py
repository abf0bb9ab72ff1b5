"""The ``mca-convert`` command.

Signal handling is imported first, so that a Ctrl-C during the other imports gives one line too; NumPy is imported only
for the work itself.
"""

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from mca_convert.interrupts import Interrupted, Interrupts

if TYPE_CHECKING:
    from mca_config.program import Program


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0 done, 1 failed, 2 wrong usage, 128 plus the number of a signal: 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP. The output
    path exists after code 0, and after a failed or interrupted upload, which the last line reports.

    Args:
        argv: The arguments; None: those of the process.
    """
    is_command, interrupts = argv is None, Interrupts()
    with ExitStack() as stack:
        stack.enter_context(interrupts.listening(to_the_end=is_command))
        try:
            from mca_config.streams import safe_streams

            stack.enter_context(safe_streams(to_the_end=is_command))
            code = _run_command(sys.argv[1:] if argv is None else argv, interrupts)
            interrupts.finish()
            return code
        except Interrupted:
            pass
        except Exception:
            if not interrupts.code:
                raise  # otherwise a library turned the signal into another exception
        sys.stderr.write(f"{interrupts.word}; nothing is left at the output path\n")
        return interrupts.code


def _run_command(argv: Sequence[str], interrupts: Interrupts) -> int:
    """Run the command and return its exit code, unless a signal ends it."""
    import logging

    from mca_config.errors import McaError
    from mca_config.program import fail
    from mca_convert.flags import program
    from mca_convert.output import write_line

    known = program()
    try:
        if (answer := known.answer(argv)) is not None:
            write_line(answer.rstrip())
            return 0 if argv else 2
        command, words = known.find_command(argv)
        parser = known.parser(command)
        options = parser.read(words)
        if command == "completion":
            write_line(_completion(known, options.shell).rstrip())
            return 0
    except McaError as error:
        return fail(error)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the workers are threads enough
    level = logging.WARNING if getattr(options, "quiet", False) else logging.INFO
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    for name in ("mca_config", "mca_models", "mca_convert"):  # not what libraries say of their requests
        logging.getLogger(name).setLevel(level)
    try:
        with without_gc():
            from mca_convert.commands import RUN

            return RUN[command](parser, options, interrupts)
    except McaError as error:
        return fail(error)
    except MemoryError:
        sys.stderr.write("error: out of memory; give fewer --workers, or a smaller --memory_limit\n")
    return 1


@contextmanager
def without_gc() -> Iterator[None]:
    """Disable garbage collection for the block: a plan has many thousand objects without cycles, and it costs 10 %."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _completion(known: "Program", shell: str) -> str:
    from mca_config.program import completion

    flags = {name: known.parser(name).flags for name in known.commands}
    return completion(known.name, shell, flags, known.default)


if __name__ == "__main__":
    sys.exit(main())
