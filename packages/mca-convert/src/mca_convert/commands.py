"""The sub-commands of ``mca-convert``: calls of `api` with the flags, text or JSON of the results, exit codes."""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mca_config.arguments import DistributingParallelArguments
from mca_config.arguments.distributing import LAYOUT_FIELDS
from mca_config.errors import McaError, Origin, list_problems
from mca_config.parser import Parser
from mca_config.printable import counted, printable
from mca_convert import api
from mca_convert.interrupts import Interrupts
from mca_convert.output import format_size, progress_bar, table, write_json, write_line
from mca_convert.pool import Progress
from mca_convert.request import OptionsError
from mca_models.storage.values import named_counts

if TYPE_CHECKING:
    from mca_convert.compare import Comparison
    from mca_convert.forecast import ConversionPlan
    from mca_convert.inspection import Inspection

_SHOWN = 10


def convert(parser: Parser, options: argparse.Namespace, interrupts: Interrupts) -> int:
    """Convert, and upload the result if requested; return the exit code."""
    if options.push_to_hub is not None:
        from mca_models.hub import require_upload

        require_upload(options.push_to_hub)
    with ExitStack() as stack:
        verb = "merging" if options.merge else "converting"
        show = stack.enter_context(progress_bar(verb, quiet=options.quiet))
        holding = stack.enter_context(interrupts.holding())
        layout = _layout(parser, options)

        def progress(done: int, total: int) -> None:
            holding()
            interrupts.check()
            show(done, total)

        try:
            result = api.convert(**_conversion(options), layout=layout, progress=progress)
        except OptionsError as error:
            parser.error(str(error))
    if not options.quiet:
        sys.stderr.write(_summary(result))
    if options.push_to_hub is not None:
        _upload(result.path, options, interrupts)
    return 0


def _conversion(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `api.convert` and `api.plan` that flags give, but for the layout."""
    names = "to fp8 adapter_path merge max_shard_size overwrite workers memory_limit".split()
    paths = {"src": options.checkpoint_path, "dst": options.output_path}
    return paths | {name: getattr(options, name) for name in names} | {"dtype": options.dtype}


def _layout(parser: Parser, options: argparse.Namespace) -> DistributingParallelArguments | None:
    """Return the layout of the flags; None: there are none. Contradictions are wrong usage."""
    sizes = {name: value for name, value in vars(options).items() if name in LAYOUT_FIELDS}
    if not sizes:
        return None
    if sizes.get("tensor_model_parallel_size", 1) > 1:
        sizes["sequence_parallel"] = True  # a setting of the training, without effect on the weights
    try:
        return DistributingParallelArguments(**sizes)
    except McaError as error:
        flags = Origin()
        flags.sources = dict.fromkeys(sizes, "--")
        parser.error("; ".join(map(flags.locate, list_problems(error))))


def _summary(result: api.ConversionResult) -> str:
    """Return the last line of a conversion."""
    named = f"{result.path}: {result.model_type}"
    tensors = counted(result.tensors, "tensor")
    if result.is_adapter:
        what = "PEFT adapter" if result.layout is None else f"MCA adapter, {result.layout}"
        return printable(f"{named}, {what}, {tensors}\n")
    what = "Hugging Face checkpoint" if result.layout is None else f"MCA checkpoint, {result.layout}"
    speed = format_size(round(result.nbytes / max(result.seconds, 1e-3)))
    return printable(
        f"{named}, {what}, {tensors}, {counted(result.files, 'file')}, "
        f"{format_size(result.nbytes)} in {result.seconds:.1f} s ({speed}/s)\n"
    )


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


def plan(parser: Parser, options: argparse.Namespace, interrupts: Interrupts) -> int:
    """Print the plan of a conversion; return 1 if the conversion would fail, else 0."""
    try:
        result = api.plan(**_conversion(options), layout=_layout(parser, options), values=options.values)
    except OptionsError as error:
        parser.error(str(error))
    if options.json:
        write_json("plan", asdict(result))
    else:
        write_line("\n".join(_plan_lines(result)))
    return 0 if result.is_possible else 1


def _plan_lines(result: "ConversionPlan") -> Iterator[str]:
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
    if result.is_possible:
        yield "this conversion can run; nothing was written"
        return
    count = len(result.refusals)
    yield f"this conversion would fail, {'for this reason' if count == 1 else f'for {count} reasons'}:"
    yield from (f"  - {reason}" for reason in result.refusals)


def _stage_table(result: "ConversionPlan") -> Iterator[str]:
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


def inspect(parser: Parser, options: argparse.Namespace, interrupts: Interrupts) -> int:
    """Print the contents of a directory; return 1 if it is incomplete or has values that are not finite, else 0."""
    found = api.inspect(options.path, top=options.top, values=options.values)
    if options.json:
        write_json("inspect", asdict(found))
    else:
        write_line(_inspection_text(found))
    return 1 if found.problem or found.not_finite else 0


def _inspection_text(found: "Inspection") -> str:
    lines = [(f"{found.kind}, not readable" if found.problem else found.kind, found.path)]
    lines += [(name, str(value)) for name, value in found.facts.items()]
    if found.files:
        nbytes = sum(found.files.values())
        count = len(found.files)
        lines.append(("files", f"{count} with weights, {format_size(nbytes)}"))
    for dtype, (tensors, nbytes) in sorted(found.dtypes.items(), key=lambda item: -item[1][1]):
        lines.append((dtype, f"{counted(tensors, 'tensor')}, {format_size(nbytes)}"))
    for name, dtype, shape, nbytes in found.biggest:
        lines.append(("biggest", f"{name} {dtype} {shape}, {format_size(nbytes)}"))
    if found.not_finite is not None:
        lines.append(("values", "" if found.not_finite else "all are finite"))
        lines[-1:] = [
            ("not finite", f"{name}, {counted(values, 'value')}") for name, values in found.not_finite.items()
        ] or lines[-1:]
    if found.problem:
        lines.append(("problem", found.problem))
    width = max((len(name) for name, _ in lines[1:]), default=0)
    head = f"{lines[0][1]}: {lines[0][0]}"
    return "\n".join([head, *(f"  {name.ljust(width)}  {value}" for name, value in lines[1:])])


def verify(parser: Parser, options: argparse.Namespace, interrupts: Interrupts) -> int:
    """Print the differences of two checkpoints; return 0 for the same model, else 1."""
    with progress_bar("comparing", quiet=options.quiet) as show:
        result = api.verify(
            options.first,
            options.second,
            tolerance=options.tolerance,
            workers=options.workers,
            memory_limit=options.memory_limit,
            progress=_checked(interrupts, show),
        )
    if options.json:
        write_json("verify", _comparison_document(result, options))
    else:
        write_line("\n".join(_comparison_lines(result, options)))
    return 0 if result.same else 1


def _checked(interrupts: Interrupts, show: Progress) -> Progress:
    def progress(done: int, total: int) -> None:
        interrupts.check()
        show(done, total)

    return progress


def _kind(result: "Comparison") -> str:
    return "adapter" if result.adapters else "model"


def _comparison_document(result: "Comparison", options: argparse.Namespace) -> dict[str, Any]:
    differences = {
        name: {
            "elements": found.elements,
            "first": {"index": found.index, "values": [_number(value) for value in found.values]},
            "largest": _number(found.largest),
        }
        for name, found in sorted(result.differences.items())
    }
    pair = {"what": _kind(result), "first": options.first, "second": options.second}
    counts = {"same": result.same, "tensors": result.tensors, "elements": result.elements}
    not_finite = dict(zip(("first", "second"), result.not_finite, strict=True))
    return {
        **pair,
        "tolerance": options.tolerance,
        **counts,
        "not_finite": not_finite,
        "problems": result.problems,
        "differences": differences,
    }


def _number(value: float) -> float | str:
    """Return ``value``, or its name if it is infinite or NaN, which JSON does not have."""
    return value if isfinite(value) else str(value)


def _comparison_lines(result: "Comparison", options: argparse.Namespace) -> Iterator[str]:
    pair = f"{options.first} and {options.second}"
    if result.same:
        how = "bit for bit" if options.tolerance is None else f"within {options.tolerance:g}"
        sizes = f"{counted(result.tensors, 'tensor')}, {counted(result.elements, 'element')}"
        yield f"same {_kind(result)}, {how}: {pair}, {sizes}"
    else:
        yield f"different {_kind(result)}s: {pair}"
    lines = [f"  {problem}" for problem in result.problems[:_SHOWN]]
    for name, difference in sorted(result.differences.items())[:_SHOWN]:
        mine, its = difference.values
        lines.append(
            f"  {name}: {difference.elements} elements differ, the first at {list(difference.index)}: {mine:g} and "
            f"{its:g}; largest difference {difference.largest:g}"
        )
    yield from lines
    if hidden := len(result.problems) + len(result.differences) - len(lines):
        yield f"  and {hidden} more"
    yield from _warnings(result, options)


def _warnings(result: "Comparison", options: argparse.Namespace) -> Iterator[str]:
    """Yield warnings about non-finite values: one line if both have the same numbers of them, else one for each."""
    first, second = (dict(sorted(counts.items())) for counts in result.not_finite)
    if first == second:
        if first:
            yield f"warning: in both, {named_counts(first)}"
        return
    for path, counts in ((options.first, first), (options.second, second)):
        if counts:
            yield f"warning: {path}: {named_counts(counts)}"


RUN: Mapping[str, Callable[[Parser, argparse.Namespace, Interrupts], int]] = {
    "convert": convert,
    "inspect": inspect,
    "plan": plan,
    "verify": verify,
}
"""Functions by command; each returns the exit code."""
