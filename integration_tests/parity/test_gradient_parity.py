"""The factory's models compute transformers' logits, choose its experts, and have the gradients of its autograd.

Gradients travel as weights do: they are put in the place of the weights and exported, so that gathering and
templates are the tested ones. `--cases all` tests the whole product of models and layouts.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint_files import read
from gradients import Computed, compute_all, expected_gradients, export_gradient, worst_errors
from harness import run_ranks
from layouts import EVERY, selected, spread, stands, tiered
from parity import TOLERANCE
from reference import DENSE_CASES, MOE_CASES, Reference, hf_model, make_reference

pytestmark = pytest.mark.ranks

DENSE_LAYOUTS = (
    *("tp1", "tp2sp", "tp4", "tp2", "cp2", "pp2vpp2"),
    *("tp2cp2sp", "tp2pp2vpp2", "cp2pp2", "pp2", "dp2", "tp2pp2"),
)
MOE_LAYOUTS = (
    *("tp1", "tp2sp", "dp2", "ep2", "cp2", "pp2vpp2"),
    *("tp2ep2etp1", "pp2vpp2ep2", "tp2cp2sp", "dp2etp2", "ep2allgather", "tp2etp2ep2"),
    *("cp2ep2", "tp2ep2etp1allgather", "tp2etp1sp", "tp2pp2ep2etp1", "cp2ep2pp2"),
)
ETP_LAYOUTS = ("dp4etp4", "tp2dp2etp4sp", "tp4etp2sp", "pp2dp2etp2")
BIASED = ("glm4_moe", "deepseek_v3")
# where a model is most easily wrong
OWN = [("mixtral", layout) for layout in ETP_LAYOUTS]
OWN += [("llama-one-group", layout) for layout in ("tp4", "tp2pp2vpp2")]
OWN += [(case, layout) for case in ("qwen2-tied", "qwen3-tied") for layout in ("tp2sp", "tp2pp2vpp2")]
OWN += [("qwen3-mixed-windows", layout) for layout in ("pp2vpp2", "cp2")]
OWN += [(case, layout) for case in BIASED for layout in ("dp2", "pp2vpp2ep2", "tp2cp2sp")]
if not EVERY:
    OWN = [
        *(("mixtral", "tp4etp2sp"), ("mixtral", "pp2dp2etp2"), ("llama-one-group", "tp4")),
        *(("qwen2-tied", "tp2pp2vpp2"), ("qwen3-tied", "tp2sp")),
        *(("qwen3-mixed-windows", "cp2"), ("qwen3-mixed-windows", "pp2vpp2")),
        *(("glm4_moe", "dp2"), ("glm4_moe", "pp2vpp2ep2"), ("deepseek_v3", "tp2cp2sp")),
    ]
GRID = list(dict.fromkeys([*spread(DENSE_CASES, DENSE_LAYOUTS), *spread(MOE_CASES, MOE_LAYOUTS), *OWN]))
WIDE = (
    *(("mistral", "tp4"), ("seed_oss", "cp2pp2"), ("llama-llama3", "tp2pp2"), ("qwen2_moe", "tp2pp2ep2etp1")),
    *(("mixtral", "pp2vpp2ep2"), ("mixtral", "tp4etp2sp"), ("qwen2_moe", "tp2cp2sp")),
    *(("qwen2-tied", "tp2pp2vpp2"), ("mixtral", "pp2dp2etp2"), ("glm4_moe", "pp2vpp2ep2")),
    *(("qwen3-mixed-windows", "pp2vpp2"), ("deepseek_v3-no-q-lora", "cp2ep2"), ("qwen2-tied", "pp2vpp2")),
    *(("deepseek_v3-no-q-lora", "pp2vpp2"), ("deepseek_v3-yarn", "tp2ep2etp1"), ("mistral-tied", "tp2")),
)


@pytest.fixture(scope="module")
def computed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Computed:
    chosen = selected(request, GRID)
    alone = [(case, "tp1") for case, _ in chosen if case in BIASED]
    return compute_all(list(dict.fromkeys([*chosen, *alone])), tmp_path_factory.mktemp("computed"))


@pytest.mark.cases(2)
@pytest.mark.parametrize("case,layout", tiered(GRID, *WIDE))
def test_logits_and_gradients_equal_transformers(case: str, layout: str, computed: Computed) -> None:
    computed.check(case, layout)


def export_gradients(references: list[Reference], layout: str, folder: Path) -> None:
    """`export_gradient` of each. Runs on every rank."""
    for each in references:
        export_gradient(each, layout, folder / f"{each.case}-{layout}")


@pytest.mark.cases(0, always=["tp2sp"])
@pytest.mark.parametrize("layout", ["tp2sp", "cp2", "pp2"])
def test_the_padding_token_gets_no_gradient_as_an_input(layout: str, tmp_path: Path) -> None:
    cases = [case for case in ("llama", "qwen3-tied", "gemma4_text-e2b") if stands(case, layout)]
    references = [make_reference(case, tmp_path, batch=4) for case in cases]
    padded = [replace(each, input_ids=each.input_ids.clone()) for each in references]
    for each in padded:
        each.input_ids[:, 5::4] = hf_model(each.case).config.pad_token_id
        expected_gradients(each, tmp_path)
    run_ranks(2, export_gradients, padded, layout, tmp_path)
    for each in padded:
        worst = worst_errors(tmp_path / f"{each.case}-expected", tmp_path / f"{each.case}-{layout}")
        assert worst[0][1] <= TOLERANCE, worst


@pytest.mark.parametrize("case,layout", [pair for pair in GRID if pair[0] in BIASED])
def test_expert_biases_move_by_the_tokens_of_all_ranks(case: str, layout: str, computed: Computed) -> None:
    moved, alone = (read(computed.folder / f"{case}-{name}") for name in (layout, "tp1"))
    biases = [name for name in moved if "e_score_correction_bias" in name]
    assert biases
    for name in biases:
        before = hf_model(case).state_dict()[name]
        assert (moved[name] - before).abs().max() > 1e-4
        assert torch.equal(moved[name], alone[name])


@pytest.mark.qualify
def test_references_are_not_trivial(tmp_path: Path) -> None:
    for case in (*DENSE_CASES, *MOE_CASES):
        assert float(make_reference(case, tmp_path).logits.std()) > 0.5, case
