"""Test cases: models on parallel layouts. `case_selector.py` selects those that run by default."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import pytest
from _pytest.mark import ParameterSet

from layouts import world_size

UNSPLIT_MODELS = ("gemma4_text-e2b", "gemma4-e2b", "gemma4-e2b-video")
"""Models whose layers all belong to one pipeline stage."""


@dataclass(frozen=True)
class Case:
    """A model on a parallel layout.

    Args:
        model: A name in `reference.CASES` or another table of models.
        layout: As in `layouts.arguments`, such as ``tp2pp2vpp2``.
        options: Names of other settings.
    """

    model: str
    layout: str
    options: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The name that pytest shows."""
        return "-".join((self.model, self.layout, *self.options))

    @property
    def num_ranks(self) -> int:
        """The ranks that the layout needs."""
        return world_size(self.layout)

    def __str__(self) -> str:
        return self.id


def product(models: Iterable[str], layouts: Sequence[str]) -> list[Case]:
    """Return every model on every layout that it can have."""
    return [Case(model, layout) for model in models for layout in layouts if can_have(model, layout)]


def can_have(model: str, layout: str) -> bool:
    """Return whether the layers of ``model`` can be cut so."""
    return model not in UNSPLIT_MODELS or "pp" not in layout


def as_params(cases: Iterable[Case]) -> list[ParameterSet]:
    """Return a parameter with its id for each case; equal cases count once."""
    return [pytest.param(case, id=case.id) for case in dict.fromkeys(cases)]


def group_by_layout(cases: Iterable[Case]) -> dict[str, list[Case]]:
    """Return the cases by layout, for one fork for each: process groups of one layout would slow those of another."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.layout, []).append(case)
    return groups


def group_by_ranks(cases: Iterable[Case]) -> dict[int, list[Case]]:
    """Return the cases by the number of ranks, for one fork for each."""
    groups: dict[int, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.num_ranks, []).append(case)
    return groups


def group_for_forks(cases: Iterable[Case], most: int = 24) -> list[list[Case]]:
    """Return groups of at most ``most`` cases of one number of ranks, those of one layout next to each other.

    A fork of a rank costs as much as a model on it, starting the process groups of another layout a tenth.
    """
    groups = (
        [case for of_layout in group_by_layout(of_size).values() for case in of_layout]
        for of_size in group_by_ranks(cases).values()
    )
    return [group[first : first + most] for group in groups for first in range(0, len(group), most)]


def skip_unsupported(request: pytest.FixtureRequest, error: str) -> NoReturn:
    """Skip a case whose layout the model does not support; a case that runs by default may not be one."""
    assert request.node.get_closest_marker("qualify"), f"runs by default: {error}"
    pytest.skip(error)


def needed(request: pytest.FixtureRequest, *names: str) -> list[Any]:
    """Return what this run's tests of the module need of the fixture ``request``: the values of a parameter.

    Args:
        request: Of the fixture.
        names: Parameters; ``case`` if none is given, tuples of values if there are several.
    """
    names = names or ("case",)
    values = [
        tuple(item.callspec.params[name] for name in names)
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and request.fixturename in item.fixturenames
        and not item.get_closest_marker("skip")
        and hasattr(item, "callspec")
        and set(names) <= item.callspec.params.keys()
    ]
    return list(dict.fromkeys(values if len(names) > 1 else (value for (value,) in values)))
