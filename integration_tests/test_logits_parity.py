"""The factory's models compute what transformers computes and choose the same experts, on every layout."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from harness import run_ranks
from layouts import arguments, selected, world_size
from reference import DENSE_CASES, MOE_CASES, Reference, make_reference
from routing import compare

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
"""The largest difference, or what went wrong: it could not be built, or chose other experts."""


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
        compared = compare(model, reference)
        found[reference.case, layout] = compared.problem() or compared.difference
    return found


@pytest.fixture(scope="module")
def measured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], list[Differences]]:
    """Every case on every layout of so many ranks, from one fork."""
    folder: Path = tmp_path_factory.mktemp("references")
    grid = selected(request, GRID)

    @cache
    def of_world(size: int) -> list[Differences]:
        pairs = [
            (make_reference(case, folder), layout) for case, layout in grid if world_size(layout) == size
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


SPLITS: dict[str, dict[str, Any]] = {
    "first-short": {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1},
    "last-short": {"pipeline_model_parallel_size": 3, "num_layers_in_last_pipeline_stage": 2},
    "string": {"pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "Et|tt|tL"},
    "string-virtual": {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "E|tt|t|tL"},
    "accounted": {
        "pipeline_model_parallel_size": 3,
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    },
}


def split_difference(reference: Reference, split: dict[str, Any], folder: Path) -> float:
    """As above, through a checkpoint of that very split. Runs on every rank."""
    from mca_config import DistributingParallelArguments
    from mca_models.megatron import AutoModel

    model = AutoModel.from_pretrained(reference.path, DistributingParallelArguments(**split))
    model.save_pretrained(folder / "mca")
    again = AutoModel.from_pretrained(folder / "mca")
    assert again.config.layout == model.config.layout
    return float((again.logits(reference.input_ids) - reference.logits).abs().max())


@pytest.mark.parametrize("case", ["llama-tied", "qwen3_moe"])
@pytest.mark.parametrize("name", SPLITS)
def test_uneven_pipelines(name: str, case: str, tmp_path: Path) -> None:
    split = SPLITS[name]
    reference = make_reference(case, tmp_path)
    size = split["pipeline_model_parallel_size"]
    assert max(run_ranks(size, split_difference, reference, split, tmp_path)) <= TOLERANCE


def test_references_are_not_trivial(tmp_path: Path) -> None:
    for case in (*DENSE_CASES, *MOE_CASES):
        assert float(make_reference(case, tmp_path).logits.std()) > 0.5, case
