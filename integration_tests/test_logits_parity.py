"""The factory's models compute what transformers computes, on every layout."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from harness import run_ranks
from layouts import arguments, world_size
from reference import DENSE_CASES, MOE_CASES, Reference, make_reference

pytestmark = pytest.mark.ranks

LAYOUTS = ("tp1", "tp2", "pp2", "pp2vpp2", "tp2pp2", "tp2pp2vpp2")
MORE_LAYOUTS = ("tp2sp", "cp2", "tp2cp2sp", "cp2pp2")
MOE_LAYOUTS = (
    "tp1",
    "tp2",
    "ep2",
    "pp2vpp2",
    "cp2",
    "tp2ep2etp1",
    "tp2etp2ep2",
    "pp2vpp2ep2",
    "tp2pp2ep2etp1",
    "cp2ep2pp2",
)
GRID = [(case, layout) for case in DENSE_CASES for layout in (*LAYOUTS, *MORE_LAYOUTS)]
GRID += [(case, layout) for case in MOE_CASES for layout in MOE_LAYOUTS]
TOLERANCE = 1e-4

Differences = dict[tuple[str, str], float | str]
"""The largest difference, or why the model could not be built."""


def differences(pairs: list[tuple[Reference, str]]) -> Differences:
    """Largest absolute difference of the logits, by case and layout. Runs on every rank."""
    from mca_models.megatron import AutoModel

    found: Differences = {}
    for reference, layout in pairs:
        try:
            model = AutoModel.from_pretrained(reference.path, arguments(layout))
        except Exception as error:  # the same on every rank: go on with the other models
            found[reference.case, layout] = f"{type(error).__name__}: {error}"
            continue
        logits = model.logits(reference.input_ids)
        found[reference.case, layout] = float((logits - reference.logits).abs().max())
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Differences]]:
    """Every case on every layout of so many ranks, from one fork."""
    folder: Path = tmp_path_factory.mktemp("references")

    @cache
    def of_world(size: int) -> list[Differences]:
        pairs = [
            (make_reference(case, folder), layout) for case, layout in GRID if world_size(layout) == size
        ]
        return run_ranks(size, differences, sorted(pairs, key=lambda pair: pair[1]), timeout=300)

    return of_world


@pytest.mark.parametrize("case,layout", GRID)
def test_logits_equal_transformers(
    case: str, layout: str, measured: Callable[[int], list[Differences]]
) -> None:
    by_rank = measured(world_size(layout))
    found = [of_rank[case, layout] for of_rank in by_rank]
    assert all(isinstance(difference, float) and difference <= TOLERANCE for difference in found), found


def test_references_are_not_trivial(tmp_path: Path) -> None:
    for case in (*DENSE_CASES, *MOE_CASES):
        assert float(make_reference(case, tmp_path).logits.std()) > 0.5, case
