"""The plan of runs with tiles, videos and audio clips agrees with the dry run, which runs the engine."""

from pathlib import Path

import pytest

from harness import run_ranks
from media_plan_cases import REQUESTS, plan_and_dry_run

pytestmark = pytest.mark.ranks

WITHIN = 0.03
"""Largest difference; the media of each case take 5 % and more, so that a plan without them is caught."""


@pytest.mark.cases(0, always=["row and column tiles"])
@pytest.mark.parametrize("name", REQUESTS)
def test_the_plan_of_media_is_what_the_engine_allocates(name: str, tmp_path: Path) -> None:
    ((real, planned),) = run_ranks(1, plan_and_dry_run, name, tmp_path, process_group=False, timeout=300)
    assert planned == pytest.approx(real, rel=WITHIN)
