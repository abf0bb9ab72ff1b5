"""Code that the commands with a conversion share: layout flags, limits, and a conversion with a progress bar."""

import argparse
import sys
import time
from pathlib import Path

from mca_config.arguments import DistributingParallelArguments
from mca_config.arguments.distributing import LAYOUT_FIELDS
from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_config.parser import Parser
from mca_config.printable import counted, printable
from mca_convert.conversion import Conversion
from mca_convert.interrupts import Interrupts
from mca_convert.open_files import allow_open_files
from mca_convert.pool import Limits, default_workers
from mca_convert.progress import bar
from mca_convert.tables import format_size
from mca_models.checkpoint.mca_directory import McaLayout


def run_conversion(
    conversion: Conversion,
    destination: Path,
    options: argparse.Namespace,
    what: str,
    interrupts: Interrupts,
) -> None:
    """Run ``conversion`` with a progress bar named ``what``, and print a summary."""
    started = time.monotonic()
    allow_open_files(conversion.open_files)
    with bar(conversion.nbytes, what, quiet=options.quiet) as progress, interrupts.holding():
        conversion.run(
            destination, make_limits(options), progress, interrupts.check, overwrite=options.overwrite
        )
    if not options.quiet:
        sys.stderr.write(_summary(conversion, destination, time.monotonic() - started))


def layout_arguments(parser: Parser, options: argparse.Namespace) -> DistributingParallelArguments:
    """Return the layout arguments of the flags; contradictions are wrong usage."""
    try:
        return read_layout(options)
    except McaError as error:
        parser.error(str(error))


def resolve_layout(
    parser: Parser, arguments: DistributingParallelArguments, source_layout: ParallelLayout
) -> ParallelLayout:
    """Return the layout of the target: the requested sizes, else those of ``source_layout``."""
    try:
        return arguments.layout(source_layout)
    except McaError as error:
        parser.error(str(error))


def read_layout(options: argparse.Namespace) -> DistributingParallelArguments:
    """Return the layout arguments of the flags.

    Raises:
        McaError: They contradict each other.
    """
    sizes = {name: value for name, value in vars(options).items() if name in LAYOUT_FIELDS}
    if sizes.get("tensor_model_parallel_size", 1) > 1:
        sizes["sequence_parallel"] = True  # a setting of the training, without effect on the weights
    return DistributingParallelArguments(**sizes)


def layout_flags_for_hf(options: argparse.Namespace, *, megatron: bool) -> str | None:
    """Return the message about layout flags for a target without a layout; None without such flags."""
    flags = [name for name in LAYOUT_FIELDS if name in vars(options)]
    if not flags:
        return None
    hint = ", or add --to mca to write the same model in another layout" if megatron else ""
    return f"--{flags[0]} is only for MCA targets, the target is hf; remove it{hint}"


def make_limits(options: argparse.Namespace) -> Limits:
    """Return the limits of the flags."""
    return Limits(workers=options.workers or default_workers(), memory=options.memory_limit)


def _summary(conversion: Conversion, destination: Path, seconds: float) -> str:
    config = conversion.target.config
    to_mca = isinstance(conversion.target, McaLayout)
    what = f"MCA checkpoint, {config.layout}" if to_mca else "Hugging Face checkpoint"
    tensors = len({fill.tensor for fill in conversion.fills})
    speed = format_size(round(conversion.nbytes / max(seconds, 1e-3)))
    return printable(
        f"{destination}: {config.model_type}, {what}, {counted(tensors, 'tensor')}, "
        f"{counted(len(conversion.target.files), 'file')}, "
        f"{format_size(conversion.nbytes)} in {seconds:.1f} s ({speed}/s)\n"
    )
