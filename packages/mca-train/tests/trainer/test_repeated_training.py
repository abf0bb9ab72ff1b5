"""Messages of a trainer that trains again into the same directory."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mca_train.checkpoint.writer import CheckpointWriter
from mca_train.trainer.base import Progress
from mca_train.trainer.saver import OutputDir


@pytest.mark.parametrize("first", [True, False])
def test_one_rank_says_which_checkpoints_are_replaced(first: bool, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text("{}")
    hf: Any = SimpleNamespace(
        args=SimpleNamespace(save_strategy="steps", output_dir=str(tmp_path), overwrite_output_dir=True),
        ranks=SimpleNamespace(is_first=first),
    )
    output = OutputDir(hf, CheckpointWriter(in_background=False), Progress())
    output.claim(None)
    assert caplog.records == [] and output.has_claimed
    output.claim(None)
    assert [record.message.partition(":")[0] for record in caplog.records] == ["train() again"] * first
    output.claim(None)
    assert len(caplog.records) == first, "said once"
