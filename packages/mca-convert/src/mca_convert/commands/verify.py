"""``mca-convert verify A B``: print the result of `compare` or `compare_adapters`."""

import argparse
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

from mca_config.printable import counted
from mca_convert.commands.conversion_run import make_limits
from mca_convert.compare import Comparison, compare
from mca_convert.compare_adapters import compare_adapters
from mca_convert.interrupts import Interrupts
from mca_convert.open_files import allow_open_files
from mca_convert.output import write_json, write_line
from mca_convert.progress import bar
from mca_models.checkpoint_kinds import checkpoint_kind, open_checkpoint
from mca_models.storage.finite import named_counts

_SHOWN = 10


def verify(options: argparse.Namespace, interrupts: Interrupts) -> int:
    """Compare two checkpoints and print the differences; return 0 for the same model, else 1."""
    paths = Path(options.first), Path(options.second)
    if any(checkpoint_kind(path).is_adapter for path in paths):
        return _print_result(compare_adapters(*paths, tolerance=options.tolerance), options, "adapter")
    first, second = (open_checkpoint(path) for path in paths)
    total = sum(info.nbytes for info in first.tensors())
    allow_open_files(len({info.file for source in (first, second) for info in source.tensors()}))
    with bar(total, "comparing", quiet=options.quiet) as progress:

        def advance(nbytes: int) -> None:
            interrupts.check()
            progress(nbytes)

        result = compare(first, second, make_limits(options), tolerance=options.tolerance, progress=advance)
    return _print_result(result, options, "model")


def _print_result(result: Comparison, options: argparse.Namespace, what: str) -> int:
    """Print the result and return the exit code."""
    if options.json:
        write_json("verify", document(result, options, what))
    else:
        write_line(report(result, options, what))
    return 0 if result.same else 1


def document(result: Comparison, options: argparse.Namespace, what: str) -> dict[str, Any]:
    """Return the full result as a JSON object."""
    differences = {}
    for name, found in sorted(result.differences.items()):
        _, index, *values = found.first or (0, (), 0.0, 0.0)
        differences[name] = {
            "elements": found.elements,
            "first": {"index": index, "values": [_number(value) for value in values]},
            "largest": _number(found.largest),
        }
    pair = {"what": what, "first": options.first, "second": options.second, "tolerance": options.tolerance}
    counts = {"same": result.same, "tensors": result.tensors, "elements": result.elements}
    not_finite = dict(zip(("first", "second"), result.not_finite, strict=True))
    return pair | counts | {"not_finite": not_finite, "problems": result.problems, "differences": differences}


def _number(value: float) -> float | str:
    """Return ``value``, or its name if it is infinite or NaN, which JSON does not have."""
    return value if isfinite(value) else str(value)


def report(result: Comparison, options: argparse.Namespace, what: str) -> str:
    """Return the result as text; ``what`` is "model" or "adapter"."""
    pair = f"{options.first} and {options.second}"
    if result.same:
        how = "bit for bit" if options.tolerance is None else f"within {options.tolerance:g}"
        sizes = f"{counted(result.tensors, 'tensor')}, {counted(result.elements, 'element')}"
        return "\n".join([f"same {what}, {how}: {pair}, {sizes}", *_warnings(result, options)])
    lines = [f"different {what}s: {pair}"]
    lines += [f"  {problem}" for problem in result.problems[:_SHOWN]]
    for name, difference in sorted(result.differences.items())[:_SHOWN]:
        _, index, mine, its = difference.first or (0, (), 0.0, 0.0)
        lines.append(
            f"  {name}: {difference.elements} elements differ, the first at {list(index)}: {mine:g} and "
            f"{its:g}; largest difference {difference.largest:g}"
        )
    hidden = len(result.problems) + len(result.differences) - (len(lines) - 1)
    if hidden:
        lines.append(f"  and {hidden} more")
    return "\n".join([*lines, *_warnings(result, options)])


def _warnings(result: Comparison, options: argparse.Namespace) -> Iterator[str]:
    """Yield warnings about non-finite values: one line if both have the same numbers of them, else one for each."""
    first, second = (dict(sorted(counts.items())) for counts in result.not_finite)
    if first == second:
        if first:
            yield f"warning: in both, {named_counts(first)}"
        return
    for path, counts in ((options.first, first), (options.second, second)):
        if counts:
            yield f"warning: {path}: {named_counts(counts)}"
