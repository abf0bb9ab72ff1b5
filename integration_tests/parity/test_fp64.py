"""In fp64 the factory's gradients are those of transformers to the last digits; in fp32 they are about as exact.

Families whose gradients in fp32 are rough: states that many tokens change, keys and experts that are chosen, clamps.
"""

from pathlib import Path

import peft
import pytest
from torch import Tensor

from cases import Case, as_params, needed
from fp64_judge import Judged, double_model, double_precision, judge
from harness import run_ranks
from lora_cases import CASES as ADAPTERS
from lora_gradients import Expected, Found, expected_of, gradients
from lora_training import adapter_gradients
from reference import make_reference

pytestmark = pytest.mark.ranks

EXACT = 1e-11
"""Relative, of gradients in fp64; at most 3e-13 was found."""
ROUNDING = 10
"""An error in fp32 is one draw of a wide distribution: by a tensor, ours were up to 18 times transformers', all
together up to 6 times; over many weights and tokens their geometric means are alike (0.9 to 1.2 times)."""
CASES = (
    *(Case("qwen3_5_text", "tp1"), Case("olmo_hybrid", "tp1")),
    *(Case("minimax_m3_vl_text", "tp2sp"), Case("qwen3_next", "tp2cp2sp")),
)
SEQUENCES = 6
"""Three in each micro-batch."""


@pytest.fixture(scope="module")
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Judged]:
    folder = tmp_path_factory.mktemp("judged")
    return {
        case: judge([make_reference(case.model, folder, batch=SEQUENCES)], case.layout, folder)[case.model]
        for case in needed(request)
    }


@pytest.mark.cases(0, always=["qwen3_5_text-tp1", "minimax_m3_vl_text-tp2sp"])
@pytest.mark.parametrize("case", as_params(CASES))
def test_gradients_are_exact_in_fp64_and_as_exact_as_transformers_in_fp32(
    case: Case, judged: dict[Case, Judged]
) -> None:
    found = judged[case]
    assert found.error(found.double) < EXACT
    assert found.error(found.ours) <= ROUNDING * found.error(found.theirs)


def both(expected: Expected) -> tuple[Found, Found]:
    """Logits and gradients of an adapter in fp32 and in fp64. Runs on a rank."""
    job = (expected.base, expected.adapter, "tp1")
    with double_precision():
        double = gradients([job])[0]
    return gradients([job])[0], double


def test_gradients_of_adapters_are_exact_in_fp64_too(tmp_path: Path) -> None:
    expected = expected_of("olmo_hybrid", tmp_path)
    lora = peft.PeftModel.from_pretrained(
        double_model(ADAPTERS["olmo_hybrid"][0]), expected.adapter, is_trainable=True
    )
    with double_precision():
        truth = adapter_gradients(lora.double().eval())
    ours, double = (_gradients(found) for found in run_ranks(1, both, expected)[0])
    found = Judged(truth, expected.gradients, ours, double)
    assert found.error(found.double) < EXACT
    assert found.error(found.ours) <= ROUNDING * found.error(found.theirs)


def _gradients(found: Found) -> dict[str, Tensor]:
    assert not isinstance(found, str), found
    assert found[1] is not None
    return found[1]
