"""The factory's models compute transformers' logits, choose its experts, and have the gradients of its autograd.

The test puts gradients in the place of weights and exports them, so that it also tests gathering and templates.
`--cases all` tests every model on every layout.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from case_tables import EXPERT_BIASES, GRADIENTS
from cases import Case, as_params, needed, product
from checkpoint_files import read
from gradients import Computed, compute_all, expected_gradients, export_gradient, worst_errors
from harness import run_ranks
from parity import TOLERANCE
from reference import Reference, hf_model, make_reference, model_for

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def computed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Computed:
    cases = needed(request)
    one_rank = [
        Case(case.model, "tp1", ("all-layers",) * ("pp" in case.layout))
        for case in cases
        if case in EXPERT_BIASES
    ]
    return compute_all(list(dict.fromkeys([*cases, *one_rank])), tmp_path_factory.mktemp("computed"))


@pytest.mark.cases(
    0,
    always=[
        *("qwen3-tied-tp2sp", "qwen2-cp2", "llama-dynamic-dp2"),
        *("glm4_moe-dp2", "glm4_moe-ep2allgather", "mixtral-tp2etp1sp", "qwen3_moe-dp2etp2"),
        "deepseek_v3-tp2cp2sp",  # the only one on four ranks
    ],
)
@pytest.mark.parametrize("case", as_params(GRADIENTS))
def test_logits_and_gradients_equal_transformers(case: Case, computed: Computed) -> None:
    computed.check(case)


def export_gradients(references: list[Reference], layout: str, folder: Path) -> None:
    """`export_gradient` of each. Runs on every rank."""
    for each in references:
        export_gradient(each, layout, folder / f"{each.model}-{layout}")


@pytest.mark.cases(0, always=["tp2sp"])
@pytest.mark.parametrize("layout", ["tp2sp", "cp2", "pp2"])
def test_the_padding_token_gets_no_gradient_as_an_input(layout: str, tmp_path: Path) -> None:
    cases = product(("llama", "qwen3-tied", "gemma4_text-e2b"), [layout])
    references = [make_reference(case.model, tmp_path, batch=4) for case in cases]
    padded = [replace(each, input_ids=each.input_ids.clone()) for each in references]
    for each in padded:
        each.input_ids[:, 5::4] = hf_model(each.model).config.pad_token_id
        expected_gradients(each, tmp_path)
    run_ranks(2, export_gradients, padded, layout, tmp_path)
    for each in padded:
        worst = worst_errors(tmp_path / f"{each.model}-expected", tmp_path / f"{each.model}-{layout}")
        assert worst[0][1] <= TOLERANCE, worst


@pytest.mark.cases(0, always=["glm4_moe-dp2", "glm4_moe-ep2allgather", "deepseek_v3-tp2cp2sp"])
@pytest.mark.parametrize("case", as_params(EXPERT_BIASES))
def test_expert_biases_move_by_the_tokens_of_all_ranks(case: Case, computed: Computed) -> None:
    model = model_for(case)
    moved, alone = (read(computed.folder / f"{model}-{layout}") for layout in (case.layout, "tp1"))
    biases = [name for name in moved if "e_score_correction_bias" in name]
    assert biases
    for name in biases:
        before = hf_model(model).state_dict()[name]
        assert (moved[name] - before).abs().max() > 1e-4
        assert torch.equal(moved[name], alone[name])


@pytest.mark.qualify
def test_references_are_not_trivial(tmp_path: Path) -> None:
    for model in {case.model for case in GRADIENTS}:
        assert float(make_reference(model, tmp_path).logits.std()) > 0.5, model
