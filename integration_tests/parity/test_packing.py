"""Packed sequences compute what each computes alone, also cut over context ranks and with windows."""

import pytest

from case_tables import PACKED
from cases import Case, as_params, needed
from packed_rows import compare_on_ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def packed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Case, tuple[float, float, float]]:
    """The largest differences of packed rows, over all ranks."""
    return compare_on_ranks(needed(request), tmp_path_factory.mktemp("packed"))


@pytest.mark.cases(0, always=["qwen2-yarn-cp2", "mistral-cp2", "deepseek_v3-cp2", "qwen3-tp2sp"])
@pytest.mark.parametrize("case", as_params(PACKED))
def test_packed_equals_separate(case: Case, packed: dict[Case, tuple[float, float, float]]) -> None:
    assert max(packed[case]) <= 1e-4
