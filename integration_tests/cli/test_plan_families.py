"""The arithmetic plan agrees with the dry run for every family, one rank each: `--cases all` runs it."""

import json
from pathlib import Path

import pytest
import tiny_hf

from family_sizes import described
from harness import run_ranks
from plan_cases import WITHIN, plan_and_dry_run

pytestmark = pytest.mark.ranks


@pytest.mark.qualify
@pytest.mark.parametrize("case", tiny_hf.ALL)
def test_the_plan_of_a_family_is_what_the_engine_allocates(case: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(described(case)))
    ((real, planned),) = run_ranks(1, plan_and_dry_run, "plain", str(tmp_path), 0, process_group=False)
    assert planned[0] == pytest.approx(real, rel=WITHIN)
