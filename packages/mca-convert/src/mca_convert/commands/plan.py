"""``mca-convert plan --checkpoint_path SRC``: print the forecast of a conversion; nothing is written."""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

from mca_config.parser import Parser
from mca_config.printable import counted
from mca_convert.commands.conversion_run import layout_flags_for_hf, make_limits, read_layout
from mca_convert.forecast.model import forecast
from mca_convert.forecast.outcome import Forecast, Request
from mca_convert.output import as_json, restore_hub_ids, write_line
from mca_convert.tables import format_size, table


def plan(parser: Parser, options: argparse.Namespace, called: Mapping[str, str]) -> int:
    """Print the plan; return 1 if the conversion would fail, else 0.

    Args:
        parser: Parser of the command.
        options: Parsed command line.
        called: Ids of Hub models, by their local directory.
    """
    if options.merge and not options.adapter_path:
        parser.error("--merge needs --adapter_path")
    if not options.checkpoint_path and (options.merge or not options.adapter_path):
        parser.error("missing --checkpoint_path")
    result = forecast(
        Request(
            path=_path(options.checkpoint_path),
            target=options.to,
            arguments=lambda: read_layout(options),
            cast=options.cast,
            limits=make_limits(options),
            max_shard_bytes=options.max_shard_size,
            destination=_path(options.output_path),
            adapter=_path(options.adapter_path),
            merge=options.merge,
            overwrite=options.overwrite,
            fp8=options.fp8,
            values=options.values,
        )
    )
    if result.target == "hf" and (fault := layout_flags_for_hf(options, megatron=True)):
        result.refusals.append(fault)
    if options.json:
        write_line(restore_hub_ids(as_json("plan", result.as_dict()), called))
    else:
        write_line(restore_hub_ids("\n".join(report(result)), called))
    return 1 if result.refusals else 0


def _path(name: str | None) -> Path | None:
    return Path(name) if name else None


def report(result: Forecast) -> Iterator[str]:
    """Yield the lines of the plan."""
    yield f"source     {result.source}: {result.kind or 'unknown'} {result.model_type}".rstrip()
    if result.model_type:
        yield (
            f"reads      {counted(result.tensors, 'tensor')}, {counted(result.parameters, 'parameter')}, "
            f"{format_size(result.read_bytes)}"
        )
    mca = f"MCA, {result.layout}" if result.layout else "MCA"
    what = mca if result.target == "mca" else "Hugging Face"
    yield f"target     {what}"
    if result.files:
        yield f"writes     {counted(len(result.files), 'file')}, {format_size(result.written_bytes)} of weights"
        yield (
            f"memory     about {format_size(result.peak_bytes)} at its peak, with "
            f"{counted(result.workers, 'thread')}"
        )
    if result.stages:
        yield ""
        yield from _stage_table(result)
    elif result.files:
        yield ""
        rows = [(name, format_size(nbytes)) for name, nbytes in result.files.items()]
        yield from table(("file", "size"), rows)
    yield ""
    yield from (f"note: {note}" for note in result.notes)
    if not result.refusals:
        yield "this conversion can run; nothing was written"
        return
    count = len(result.refusals)
    yield f"this conversion would fail, {'for this reason' if count == 1 else f'for {count} reasons'}:"
    yield from (f"  - {reason}" for reason in result.refusals)


def _stage_table(result: Forecast) -> Iterator[str]:
    experts = any(stage.expert_bytes for stage in result.stages)
    head = ["pipeline rank", "holds", "tensors", "a tensor rank"]
    head += ["an expert rank", "a GPU"] if experts else []
    rows = []
    for stage in result.stages:
        row = [str(stage.rank), stage.holds, str(stage.tensors), format_size(stage.dense_bytes)]
        if experts:
            row += [format_size(stage.expert_bytes), format_size(stage.dense_bytes + stage.expert_bytes)]
        rows.append(row)
    yield from table(head, rows)
