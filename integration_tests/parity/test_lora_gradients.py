"""Gradients of every adapter tensor equal those of ``peft`` on the HF model, for every family."""

import pytest

from case_tables import ADAPTER_GRADIENTS
from cases import Case, as_params, group_for_forks, needed
from harness import run_ranks
from lora_cases import CASES
from lora_gradients import TOLERANCE, WIDER, Expected, Found, assert_equal_pefts, expected_of, gradients
from mca_models.templates import FAMILIES
from reference import CASES as REFERENCES

pytestmark = [pytest.mark.ranks, pytest.mark.one_fork]


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Expected]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: expected_of(name, folder) for name in {case.model for case in needed(request)}}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, expected: dict[str, Expected]) -> dict[Case, Found]:
    """Return rank 0's figures of each case."""
    made: dict[Case, Found] = {}
    for cases in group_for_forks(needed(request)):
        jobs = [(expected[case.model].base, expected[case.model].adapter, case.layout) for case in cases]
        first, *_ = run_ranks(cases[0].num_ranks, gradients, jobs, timeout=300)
        made |= dict(zip(cases, first, strict=True))
    return made


def test_every_family_is_here() -> None:
    text = {
        name for name, family in FAMILIES.items() if family.vision is None
    }  # others: test_vision_text_only
    assert {REFERENCES[case][0] for case, _ in CASES.values()} == text


@pytest.mark.cases(
    150,
    always=[
        # an axis each, and linears that others name otherwise
        *("qwen2-pp2", "gemma3_text-cp2", "deepseek_v3-tp1", "qwen3_5_moe_text-cp2ep2", "gpt2-tp2sp"),
        *("gemma4_text-e2b-tp2sp", "llama-saved-tp2sp", "kimi_linear-cp2ep2"),
    ],
)
@pytest.mark.parametrize("case", as_params(ADAPTER_GRADIENTS))
def test_gradients_equal_pefts(case: Case, expected: dict[str, Expected], found: dict[Case, Found]) -> None:
    assert_equal_pefts(expected[case.model], found[case], WIDER.get(case.model, TOLERANCE))
