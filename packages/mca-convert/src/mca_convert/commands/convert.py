"""``mca-convert --checkpoint_path SRC --output_path DST``."""

import argparse
import sys
import time
from pathlib import Path

from mca_config.arguments import DistributingParallelArguments
from mca_config.arguments.distributing import LAYOUT_FIELDS
from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_convert.conversion import Conversion, plan_to_hf, plan_to_mca, refuse_taken
from mca_convert.interrupts import Interrupts
from mca_convert.open_files import allow_open_files
from mca_convert.output import printable
from mca_convert.pool import Limits, default_workers
from mca_convert.progress import bar
from mca_convert.tables import size_of
from mca_models.checkpoint.mca_directory import McaLayout
from mca_models.opening import kind_of, open_checkpoint


def convert(parser: argparse.ArgumentParser, options: argparse.Namespace, interrupts: Interrupts) -> int:
    """Plans, converts and reports; returns the exit code."""
    if options.adapter_path:
        from mca_convert.commands.adapter import convert_adapter

        return convert_adapter(parser, options, interrupts)
    if options.merge:
        parser.error("--merge needs --adapter_path")
    if not options.checkpoint_path:
        parser.error("the following arguments are required: --checkpoint_path")
    source_path, destination = Path(options.checkpoint_path), Path(options.output_path)
    refuse_taken(source_path, destination, overwrite=options.overwrite)
    carry_out(plan(parser, options), destination, options, "converting", interrupts)
    return 0


def carry_out(
    conversion: Conversion,
    destination: Path,
    options: argparse.Namespace,
    what: str,
    interrupts: Interrupts,
) -> None:
    """Runs ``conversion`` under a progress bar that says ``what``, and sums it up."""
    started = time.monotonic()
    allow_open_files(conversion.open_files)
    with bar(conversion.nbytes, what, quiet=options.quiet) as progress, interrupts.holding():
        conversion.run(
            destination, limits_of(options), progress, interrupts.check, overwrite=options.overwrite
        )
    if not options.quiet:
        sys.stderr.write(_summary(conversion, destination, time.monotonic() - started))


def plan(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Conversion:
    """The conversion that the flags ask for; nothing is written."""
    path = Path(options.checkpoint_path)
    megatron = kind_of(path).is_megatron
    target = options.to or ("hf" if megatron else "mca")
    if target == "hf" and (fault := layout_flags_for_hf(options, megatron=megatron)):
        parser.error(fault)
    arguments = layout_arguments(parser, options)
    source = open_checkpoint(path, options.cast)
    if target == "hf":
        return plan_to_hf(source, options.cast, options.max_shard_size)
    return plan_to_mca(source, layout_of(parser, arguments, source.config.layout), options.cast)


def layout_arguments(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> DistributingParallelArguments:
    """The layout that the flags ask for; one that no model could have is wrong usage."""
    try:
        return read_layout(options)
    except McaError as error:
        parser.error(str(error))


def layout_of(
    parser: argparse.ArgumentParser, arguments: DistributingParallelArguments, own: ParallelLayout
) -> ParallelLayout:
    """The layout of the target: what was asked for, else the source's ``own``."""
    try:
        return arguments.layout(own)
    except McaError as error:
        parser.error(str(error))


def read_layout(options: argparse.Namespace) -> DistributingParallelArguments:
    """The layout that the flags ask for.

    Raises:
        McaError: They contradict each other.
    """
    given = {name: value for name, value in vars(options).items() if name in LAYOUT_FIELDS}
    if given.get("tensor_model_parallel_size", 1) > 1:
        given["sequence_parallel"] = True  # which is for the training to say; weights are cut alike
    return DistributingParallelArguments(**given)


def layout_flags_for_hf(options: argparse.Namespace, *, megatron: bool) -> str | None:
    """What is wrong with layout flags where the target has no layout; None if there are none."""
    given = [name for name in LAYOUT_FIELDS if name in vars(options)]
    if not given:
        return None
    hint = ", or add --to mca to write the same model in another layout" if megatron else ""
    return f"--{given[0]} says how an MCA target is cut, the target is hf; remove it{hint}"


def limits_of(options: argparse.Namespace) -> Limits:
    """Threads and memory asked for."""
    return Limits(workers=options.workers or default_workers(), memory=options.memory_limit)


def _summary(conversion: Conversion, destination: Path, seconds: float) -> str:
    config = conversion.target.config
    to_mca = isinstance(conversion.target, McaLayout)
    what = f"MCA checkpoint, {config.layout}" if to_mca else "Hugging Face checkpoint"
    tensors = len({fill.tensor for fill in conversion.fills})
    speed = size_of(round(conversion.nbytes / max(seconds, 1e-3)))
    return printable(
        f"{destination}: {config.model_type}, {what}, {tensors} tensors, {len(conversion.target.files)} files, "
        f"{size_of(conversion.nbytes)} in {seconds:.1f} s ({speed}/s)\n"
    )
