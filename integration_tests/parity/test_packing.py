"""Packed sequences compute what each computes alone, also cut over context ranks and with windows."""

from pathlib import Path

import pytest

from harness import run_ranks
from layouts import EVERY, world_size
from packed_rows import compare_all
from reference import make_reference

pytestmark = pytest.mark.ranks

LAYOUTS = ("tp1", "cp2", "tp2sp", "tp2cp2sp")
CASES = ("qwen3", "mistral", "qwen2-yarn", "deepseek_v3")


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(size, marks=[pytest.mark.qualify] if size == 4 else [])
        for size in sorted({world_size(layout) for layout in LAYOUTS})
    ],
)
def test_packed_equals_separate(size: int, tmp_path: Path) -> None:
    references = [make_reference(case, tmp_path) for case in CASES]
    layouts = [layout for layout in LAYOUTS if world_size(layout) == size]
    if size == 4 and not EVERY:
        references = references[1:3]
    for of_rank in run_ranks(size, compare_all, references, layouts):
        for pair, found in of_rank.items():
            assert max(found) <= 1e-4, pair
