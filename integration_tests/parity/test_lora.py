"""LoRA on Megatron's linears computes, trains and saves what ``peft`` does on the HF model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from case_tables import TRAINED_ADAPTER_CASES
from cases import Case, as_params, group_for_forks, needed
from harness import run_ranks
from layouts import arguments
from lora_cases import CASES
from lora_training import LEARNING_RATE, adapter_of, loaded_logits, tokens, train_megatron
from reference import make_reference

pytestmark = [pytest.mark.ranks, pytest.mark.one_fork]


TOLERANCE = 1e-4
TRAINED = 20 * TOLERANCE
"""Bound for logits after training: weights of Gemma 2 that are 4e-6 apart give logits that are 1.1e-3 apart."""

Logits = dict[str, torch.Tensor]
Found = dict[Case, tuple[list[Logits | str], Path]]
"""By case: the logits on every rank, or why it failed, and where the adapter was saved."""


@pytest.fixture(scope="module")
def theirs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """By adapter: the base directory and what peft computes with it."""
    folder = tmp_path_factory.mktemp("lora")
    made = {}
    for name in dict.fromkeys(case.model for case in needed(request)):
        base, settings = CASES[name]
        path = make_reference(base, folder).path
        made[name] = {"base": path, **adapter_of(path, folder / f"{name}-peft", settings)}
    return made


def run_cases(jobs: list[tuple[Path, Path, str, Path]]) -> list[Logits | str]:
    """``run_case`` of each, or why it failed. Runs on every rank."""
    found: list[Logits | str] = []
    for job in jobs:
        try:
            found.append(run_case(*job))
        except Exception as error:  # the same on every rank: go on with the other models
            found.append(f"{type(error).__name__}: {error}")
    return found


def run_case(base: Path, adapter: Path, layout: str, saved: Path) -> Logits:
    """Logits of one adapter on one layout before and after training."""
    from mca_models.megatron import AutoModel
    from mca_models.megatron.peft import load_adapter

    models = load_adapter(AutoModel.from_pretrained(base, arguments(layout)), adapter)
    found = {"before": models.logits(tokens())}
    models.merge_adapter()
    found["merged"] = models.logits(tokens())
    models.unmerge_adapter()
    found["unmerged"] = models.logits(tokens())
    train_megatron(models)
    found["after"] = models.logits(tokens())
    models.save_pretrained(saved / "mca")
    models.save_pretrained_as_hf(saved / "peft")
    plain = models.merge_and_unload()
    found["unloaded"] = plain.logits(tokens())
    again = load_adapter(AutoModel.from_pretrained(base, arguments(layout)), saved / "mca")
    found["loaded"] = again.logits(tokens())
    return found


@pytest.fixture(scope="module")
def ours(
    request: pytest.FixtureRequest,
    theirs: dict[str, dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Found:
    """Return mca's figures of each case."""
    folder = tmp_path_factory.mktemp("trained")
    found: Found = {}
    for cases in group_for_forks(needed(request)):
        jobs = [
            (theirs[case.model]["base"], theirs[case.model]["adapter"], case.layout, folder / case.id)
            for case in cases
        ]
        for rank in run_ranks(cases[0].num_ranks, run_cases, jobs, timeout=300):
            for case, logits in zip(cases, rank, strict=True):
                found.setdefault(case, ([], folder / case.id))[0].append(logits)
    return found


# test_lora_gradients.py tests the other layouts by default
@pytest.mark.cases(0, always=["qwen2_moe-ep2"])
@pytest.mark.parametrize("case", as_params(TRAINED_ADAPTER_CASES))
def test_training_equals_peft(case: Case, theirs: dict[str, dict[str, Any]], ours: Found) -> None:
    right = theirs[case.model]
    by_rank, saved = ours[case]
    assert float((right["after"] - right["before"]).abs().max()) > 0.05
    for found in by_rank:
        assert not isinstance(found, str), found
        for name in ("before", "merged", "unmerged"):
            assert float((found[name] - right["before"]).abs().max()) <= TOLERANCE, name
        for name in ("after", "unloaded", "loaded"):
            assert float((found[name] - right["after"]).abs().max()) <= TRAINED, name
        assert torch.equal(found["unmerged"], found["before"])
    reloaded = loaded_logits(right["base"], saved / "peft")
    assert float((reloaded - right["after"]).abs().max()) <= TRAINED
    written, reference = (
        load_file(f / "adapter_model.safetensors") for f in (saved / "peft", right["trained"])
    )
    assert written.keys() == reference.keys()
    # Adam turns the rounding of tiny gradients into parts of a step; the three steps move each weight by up to 6e-3
    apart = {name: float((written[name] - reference[name]).abs().max()) for name in written}
    assert max(apart.values()) < LEARNING_RATE / 2, apart
