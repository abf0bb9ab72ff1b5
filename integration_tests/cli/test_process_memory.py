"""Memory that a run adds to the process of a rank, which the dry run predicts to a tenth.

What is there before is subtracted: the interpreter and all that is imported. Of what comes on top of tensors, pages
that the allocator keeps free are left out (`memory.peak`); docs/validation/evidence.md says how many they are.
"""

from pathlib import Path

import pytest

from harness import run_ranks
from step_memory import CASES, said, taken, write_model

pytestmark = pytest.mark.ranks

WITHIN = 0.10


@pytest.mark.qualify
@pytest.mark.parametrize("name", CASES)
def test_a_process_takes_what_the_dry_run_says(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, name)
    real = run_ranks(CASES[name][1], taken, tmp_path, name, timeout=300)
    for rank, bytes_of_process in enumerate(real):
        (planned,) = run_ranks(1, said, tmp_path, name, rank, process_group=False)
        assert bytes_of_process == pytest.approx(planned, rel=WITHIN), f"rank {rank}"
