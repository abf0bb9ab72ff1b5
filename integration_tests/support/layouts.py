"""Parallel layouts of tests, by short names such as ``tp2pp2vpp2``."""

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from mca_config.arguments import DistributingParallelArguments
from mca_config.layout import SIZE_FIELDS

Pair = tuple[str, str]
ONE_STAGE = ("gemma4_text-e2b",)
"""Cases whose layers all stand on one pipeline stage."""
EVERY = bool(os.environ.get("MCA_ALL_CASES"))
"""Test every case on every layout; by default a choice, in which each of both is at least once."""


def spread(cases: Sequence[str], layouts: Sequence[str]) -> list[Pair]:
    """Each case on a layout and each layout with a case, in as few pairs as there are of the longer; or the product.

    A case that cannot stand on its layout takes the first that it can.
    """
    if EVERY:
        return [(case, layout) for case in cases for layout in layouts if stands(case, layout)]
    longer = range(max(len(cases), len(layouts)))
    pairs = [(cases[number % len(cases)], layouts[number % len(layouts)]) for number in longer]
    others = {case: [layout for layout in layouts if stands(case, layout)][:1] for case in cases}
    return list(
        dict.fromkeys(
            (case, own)
            for case, layout in pairs
            for own in ([layout] if stands(case, layout) else others[case])
        )
    )


def stands(case: str, layout: str) -> bool:
    """Whether the model of ``case`` can be laid out so."""
    return case not in ONE_STAGE or "pp" not in layout


def sample(cases: Iterable[str], *names: str) -> list[str]:
    """Those of ``cases`` that are in ``names``, which are tested by default; or all."""
    every = list(cases)
    if unknown := set(names) - set(every):
        raise ValueError(f"no case {', '.join(sorted(unknown))}")
    return every if EVERY else [case for case in every if case in names]


def by_case(cases: Iterable[str], layouts: Sequence[str], some: Iterable[Pair]) -> dict[str, list[Pair]]:
    """Pairs of case and layout that one test takes: ``some`` of all together; with `EVERY` all, case by case."""
    if not EVERY:
        return {"sample": list(some)}
    return {case: [(case, layout) for layout in layouts if stands(case, layout)] for case in cases}


def tiered(cases: Sequence[Any], *wide: Any) -> list[ParameterSet]:
    """``cases``, of which those in ``wide`` are run by ``pytest --cases all`` alone; or, with `EVERY`, all alike."""
    unknown = [case for case in wide if case not in cases]
    if unknown and not EVERY:
        raise ValueError(f"no case {unknown}")
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.qualify] if case in wide and not EVERY else [],
        )
        for case in cases
    ]


def arguments(name: str, **settings: Any) -> DistributingParallelArguments:
    """The arguments of layout ``name``; ``sp`` at its end is sequence parallelism, ``allgather`` that dispatcher."""
    sizes = {SIZE_FIELDS["tp"]: 1, SIZE_FIELDS["pp"]: 1}
    sizes |= {
        SIZE_FIELDS[axis]: int(size) for axis, size in re.findall(r"([a-z]+)(\d+)", name) if axis != "dp"
    }
    sequence_parallel = True if name.endswith("sp") else None
    if name.endswith("allgather"):
        settings["moe_token_dispatcher_type"] = "allgather"
    return DistributingParallelArguments(**sizes, sequence_parallel=sequence_parallel, **settings)


def by_layout(grid: Sequence[Pair]) -> dict[str, list[str]]:
    """The cases of ``grid`` by layout. Fork for each: groups of one layout stay, and take time, beside another's."""
    found: dict[str, list[str]] = {}
    for case, layout in grid:
        found.setdefault(layout, []).append(case)
    return found


def selected(request: pytest.FixtureRequest, grid: Sequence[Pair]) -> list[Pair]:
    """The pairs of case and layout in ``grid`` that a test of this run needs of the fixture ``request``."""
    wanted = chosen(request, "case", "layout")
    return [pair for pair in grid if pair in wanted]


def chosen(request: pytest.FixtureRequest, *names: str) -> set[Any]:
    """The values of the parameters ``names`` of this run's tests that need the fixture ``request``."""
    params = [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and not item.get_closest_marker("skip")
        and request.fixturename in item.fixturenames
        and item.module is request.module
        and hasattr(item, "callspec")
    ]
    found = {tuple(each.get(name) for name in names) for each in params}
    return found if len(names) > 1 else {value for (value,) in found}


def world_size(name: str) -> int:
    """Ranks that layout ``name`` needs: tp x pp x cp x dp, and as many as ep x etp x pp needs."""
    sizes = {axis: int(size) for axis, size in re.findall(r"([a-z]+)(\d+)", name)}
    pp, tp = sizes.get("pp", 1), sizes.get("tp", 1)
    dense = tp * pp * sizes.get("cp", 1) * sizes.get("dp", 1)
    return max(dense, sizes.get("ep", 1) * sizes.get("etp", tp if "ep" in sizes else 1) * pp)
