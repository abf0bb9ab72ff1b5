"""Gradients of every adapter tensor equal those of ``peft`` on the HF model, for every family."""

import pytest

from harness import run_ranks
from layouts import EVERY, Pair, by_layout, sample, selected, spread, tiered, world_size
from lora_cases import ALIKE, CASES, OWN
from lora_gradients import TOLERANCE, WIDER, Expected, Found, assert_equal_pefts, expected_of, gradients
from mca_models.templates import FAMILIES
from parity import is_sparse
from reference import CASES as REFERENCES

pytestmark = [pytest.mark.ranks, pytest.mark.one_fork]

LAYOUTS = ("tp2pp2", "tp1", "tp2cp2sp") if EVERY else ("pp2", "tp1", "tp2sp", "tp2pp2", "cp2")
EXPERT_LAYOUTS = ("cp2ep2", "tp1", "tp2ep2etp1sp")
SPARSE = [case for case, (_, settings) in OWN.items() if settings.get("target_parameters")]
GRID = spread([case for case in OWN if case not in SPARSE], LAYOUTS) + spread(SPARSE, EXPERT_LAYOUTS)
# by default those that name a linear otherwise than others
BY_NAME = sample(
    ALIKE,
    *(
        "falcon",
        "gemma4_text-e2b",
        "glm",
        "gpt2",
        "granitemoe",
        "granitemoeshared",
        "hy_v3",
        "kimi_linear",
        "minimax_m3_vl_text",
        "phi",
    ),
)
GRID += spread([case for case in BY_NAME if not is_sparse(case)], LAYOUTS if EVERY else ("tp2sp",))
GRID += spread([case for case in BY_NAME if is_sparse(case)], EXPERT_LAYOUTS)
RESEMBLING = (
    "cwm",
    "exaone4",
    "mistral",
    "seed_oss",
    "smollm3",
    "olmoe",
    "glm4_moe_lite",
    "minimax_m2",
)
RESEMBLING += (
    ()
    if EVERY
    else (
        *("deepseek_v2", "glm", "glm4", "granitemoe", "granitemoeshared", "hy_v3", "olmo3", "phi", "phi3"),
        *("falcon", "gemma2", "glm4_moe", "olmo2", "qwen2_moe", "qwen2-tied-qv", "qwen3_moe"),
    )
)
WIDE = [pair for pair in GRID if pair[0] in RESEMBLING]


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Expected]:
    folder = tmp_path_factory.mktemp("adapters")
    cases = dict.fromkeys(case for case, _ in selected(request, GRID))
    return {case: expected_of(case, folder) for case in cases}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, expected: dict[str, Expected]) -> dict[Pair, Found]:
    """What the factory makes of every case on every layout, as rank 0 has it."""
    made: dict[Pair, Found] = {}
    for layout, cases in by_layout(selected(request, GRID)).items():
        jobs = [(expected[case].base, expected[case].adapter, layout) for case in cases]
        of_first = run_ranks(world_size(layout), gradients, jobs, timeout=300)[0]
        made |= {(case, layout): each for case, each in zip(cases, of_first, strict=True)}
    return made


def test_every_family_is_here() -> None:
    text = {name for name, family in FAMILIES.items() if family.vision is None}  # others: test_vision_carried
    assert {REFERENCES[case][0] for case, _ in CASES.values()} == text


@pytest.mark.cases(
    3,
    always=[
        "qwen2-pp2",
        "gemma3_text-cp2",
        "deepseek_v3-tp1",
        "qwen3_5_moe_text-cp2ep2",
        "gemma4_text-e2b-tp2sp",
    ],
)
@pytest.mark.parametrize("case,layout", tiered(GRID, *WIDE))
def test_gradients_equal_pefts(
    case: str, layout: str, expected: dict[str, Expected], found: dict[Pair, Found]
) -> None:
    assert_equal_pefts(expected[case], found[case, layout], WIDER.get(case, TOLERANCE))
