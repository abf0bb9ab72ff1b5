"""``mca-convert inspect PATH``: print the contents of a directory, see `mca_convert.inspection`."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from mca_config.printable import counted
from mca_convert.inspection import Inspection, inspect_directory
from mca_convert.output import as_json, restore_hub_ids, write_line
from mca_convert.pool import Limits, default_workers
from mca_convert.tables import format_size


def inspect(options: argparse.Namespace, called: Mapping[str, str]) -> int:
    """Print the inspection; return 1 if the checkpoint is incomplete or ``--values`` finds non-finite values, else 0.

    Args:
        options: Parsed command line.
        called: Ids of Hub models, by their local directory.
    """
    limits = Limits(workers=default_workers()) if options.values else None
    found = inspect_directory(Path(options.path), options.top, limits)
    if options.json:
        write_line(restore_hub_ids(as_json("inspect", found.as_dict()), called))
    else:
        write_line(restore_hub_ids(report(found), called))
    return 1 if found.problem or found.not_finite else 0


def report(found: Inspection) -> str:
    """Return the inspection as text."""
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
    width = max(len(name) for name, _ in lines[1:]) if lines[1:] else 0
    head = f"{lines[0][1]}: {lines[0][0]}"
    return "\n".join([head, *(f"  {name.ljust(width)}  {value}" for name, value in lines[1:])])
