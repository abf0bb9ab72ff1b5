"""``mca-convert --checkpoint_path SRC --output_path DST``: conversion and upload."""

import argparse
import sys
from pathlib import Path

from mca_config.errors import McaError
from mca_config.parser import Parser
from mca_convert.commands.conversion_run import (
    layout_arguments,
    layout_flags_for_hf,
    resolve_layout,
    run_conversion,
)
from mca_convert.conversion import Conversion, plan_to_hf, plan_to_mca, require_free_destination
from mca_convert.interrupts import Interrupts
from mca_models.checkpoint_kinds import checkpoint_kind, open_checkpoint


def convert(parser: Parser, options: argparse.Namespace, interrupts: Interrupts) -> int:
    """Plan and run the conversion, and upload the result if requested; return the exit code."""
    if not options.push_to_hub:
        return _convert(parser, options, interrupts)
    from mca_models.hub import require_upload

    require_upload(options.push_to_hub)
    code = _convert(parser, options, interrupts)
    if code == 0:
        _upload(Path(options.output_path), options, interrupts)
    return code


def _upload(folder: Path, options: argparse.Namespace, interrupts: Interrupts) -> None:
    """Upload the result; an error says that the local copy is complete."""
    from mca_models.hub import upload

    with interrupts.ending_at_once(f"{folder} is complete, the upload to {options.push_to_hub} is not"):
        try:
            address = upload(folder, options.push_to_hub)
        except McaError as error:
            raise McaError(f"{error} ({folder} is complete, only the upload failed)") from None
    if not options.quiet:
        sys.stderr.write(f"uploaded to {address}\n")


def _convert(parser: Parser, options: argparse.Namespace, interrupts: Interrupts) -> int:
    if options.adapter_path:
        from mca_convert.commands.adapter import convert_adapter

        return convert_adapter(parser, options, interrupts)
    if options.merge:
        parser.error("--merge needs --adapter_path")
    if not options.checkpoint_path:
        parser.error("missing --checkpoint_path")
    source_path, destination = Path(options.checkpoint_path), Path(options.output_path)
    require_free_destination([source_path], destination, overwrite=options.overwrite)
    run_conversion(plan(parser, options), destination, options, "converting", interrupts)
    return 0


def plan(parser: Parser, options: argparse.Namespace) -> Conversion:
    """Return the conversion that the flags request, without writing anything."""
    path = Path(options.checkpoint_path)
    megatron = checkpoint_kind(path).is_megatron
    target = options.to or ("hf" if megatron else "mca")
    if target == "hf" and (fault := layout_flags_for_hf(options, megatron=megatron)):
        parser.error(fault)
    arguments = layout_arguments(parser, options)
    source = open_checkpoint(path, options.cast)
    if target == "hf":
        return plan_to_hf(source, options.cast, options.max_shard_size, fp8=options.fp8)
    if options.fp8:
        parser.error("--fp8 is for Hugging Face targets; add --to hf, or remove it")
    return plan_to_mca(source, resolve_layout(parser, arguments, source.config.layout), options.cast)
