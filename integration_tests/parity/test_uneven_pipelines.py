"""Pipelines that are not cut evenly compute what transformers computes, also through their own checkpoint."""

from pathlib import Path
from typing import Any

import pytest

from cases import needed
from harness import run_ranks
from reference import Reference, make_reference

pytestmark = pytest.mark.ranks

TOLERANCE = 1e-4

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


CASES = ("llama-tied", "qwen3_moe")


def differences(
    references: dict[str, Reference], chosen: list[tuple[str, str]], size: int, folder: Path
) -> dict[tuple[str, str], float]:
    """Return the differences of the logits of every chosen model and split, through a checkpoint of that split.

    Runs on every rank.
    """
    from mca_config import DistributingParallelArguments
    from mca_models.megatron import AutoModel

    found = {}
    for case, name in chosen:
        split, reference = SPLITS[name], references[case]
        if split["pipeline_model_parallel_size"] != size:
            continue
        model = AutoModel.from_pretrained(reference.path, DistributingParallelArguments(**split))
        saved = folder / f"{case}-{name}"
        model.save_pretrained(saved)
        again = AutoModel.from_pretrained(saved)
        assert again.config.layout == model.config.layout
        found[case, name] = float((again.logits(reference.input_ids) - reference.logits).abs().max())
    return found


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[tuple[str, str], float]]:
    """Return the differences of all ranks."""
    folder = tmp_path_factory.mktemp("splits")
    references = {case: make_reference(case, folder) for case in CASES}
    chosen = needed(request, "case", "name")
    return [
        of_rank
        for size in (2, 3)
        for of_rank in run_ranks(size, differences, references, chosen, size, folder)
    ]


# each split with one model, each model on two and on three stages
@pytest.mark.cases(
    0,
    always=[
        *("first-short-llama-tied", "last-short-qwen3_moe", "string-llama-tied"),
        *("string-virtual-qwen3_moe", "accounted-llama-tied"),
    ],
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", SPLITS)
def test_uneven_pipelines(name: str, case: str, found: list[dict[tuple[str, str], float]]) -> None:
    by_rank = [of_rank[case, name] for of_rank in found if (case, name) in of_rank]
    assert len(by_rank) == SPLITS[name]["pipeline_model_parallel_size"]
    assert max(by_rank) <= TOLERANCE
