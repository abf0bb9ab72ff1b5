"""``--adapter_path``: conversion of LoRA adapters from PEFT to MCA and back, and merging into their base model."""

import argparse
import logging
import sys
from pathlib import Path
from typing import Literal

from mca_config.layout import ParallelLayout
from mca_config.parser import Parser
from mca_config.printable import counted, printable
from mca_convert.commands.conversion_run import (
    layout_arguments,
    layout_flags_for_hf,
    resolve_layout,
    run_conversion,
)
from mca_convert.conversion import plan_to_hf, plan_to_mca, require_adapter, require_free_destination
from mca_convert.interrupts import Interrupts
from mca_models.checkpoint.side_files import different_tokenizer
from mca_models.checkpoint_kinds import open_checkpoint

logger = logging.getLogger(__name__)


def convert_adapter(parser: Parser, options: argparse.Namespace, interrupts: Interrupts) -> int:
    """Convert the adapter of ``--adapter_path``, or merge it; return the exit code."""
    adapter, destination = Path(options.adapter_path), Path(options.output_path)
    base = Path(options.checkpoint_path) if options.checkpoint_path else None
    require_free_destination(filter(None, (adapter, base)), destination, overwrite=options.overwrite)
    require_adapter(adapter)
    if options.merge:
        return _merge(parser, options, adapter, destination, interrupts)
    if options.fp8:
        parser.error("--fp8 is for full models; add --merge, or remove it")
    from mca_models.lora import convert_adapter as convert
    from mca_models.lora import is_mca_adapter, load_model_config

    target: Literal["mca", "hf"] = options.to or ("hf" if is_mca_adapter(adapter) else "mca")
    if target == "hf" and (fault := layout_flags_for_hf(options, megatron=is_mca_adapter(adapter))):
        parser.error(fault)
    arguments = layout_arguments(parser, options)
    source_layout = _adapter_layout(adapter) if is_mca_adapter(adapter) else ParallelLayout()
    layout = resolve_layout(parser, arguments, source_layout)
    model = None if base is None else load_model_config(base)
    with interrupts.holding():
        converted = convert(
            adapter,
            destination,
            model=model,
            to=target,
            layout=layout,
            cast=options.cast,
            overwrite=options.overwrite,
            proceed=interrupts.check,
        )
    if options.quiet:
        return 0
    kind = "PEFT adapter" if target == "hf" else f"MCA adapter, {layout}"
    sys.stderr.write(
        printable(
            f"{destination}: {converted.model.model_type}, {kind}, {counted(len(converted.params), 'tensor')}\n"
        )
    )
    return 0


def _adapter_layout(adapter: Path) -> ParallelLayout:
    from mca_config.model_config import McaModelConfig

    return McaModelConfig.load(adapter).layout


def _merge(
    parser: Parser,
    options: argparse.Namespace,
    adapter: Path,
    destination: Path,
    interrupts: Interrupts,
) -> int:
    if not options.checkpoint_path:
        parser.error("--merge needs the base model: --checkpoint_path")
    if options.fp8 and options.to == "mca":
        parser.error("--fp8 is for Hugging Face targets; remove it, or --to mca")
    if options.to != "mca" and (fault := layout_flags_for_hf(options, megatron=True)):
        parser.error(fault)
    from mca_models.lora import MergedSource, open_adapter

    if names := different_tokenizer(Path(options.checkpoint_path), adapter):
        logger.info(
            "tokenizer: the base model's files are written; %s has other versions of %s",
            adapter,
            ", ".join(names),
        )
    base = open_checkpoint(Path(options.checkpoint_path), options.cast)
    source = MergedSource(base, open_adapter(adapter, base.config), options.cast)
    if options.to == "mca":
        arguments = layout_arguments(parser, options)
        conversion = plan_to_mca(source, resolve_layout(parser, arguments, base.config.layout), options.cast)
    else:
        conversion = plan_to_hf(source, options.cast, options.max_shard_size, fp8=options.fp8)
    run_conversion(conversion, destination, options, "merging", interrupts)
    return 0
