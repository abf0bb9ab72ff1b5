"""What a trainer says that trains again into the same directory."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mca_train.trainer.saving import CheckpointMixin


@pytest.mark.parametrize("first", [True, False])
def test_one_rank_says_which_checkpoints_are_replaced(first: bool, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text("{}")
    trainer: Any = SimpleNamespace(
        _claimed=tmp_path.resolve(),
        _replaces=False,
        _checkpoints=SimpleNamespace(written=[]),
        args=SimpleNamespace(save_strategy="steps"),
        ranks=SimpleNamespace(is_first=first),
    )
    CheckpointMixin._claim(trainer, tmp_path, None)
    assert trainer._replaces
    assert [record.message.partition(":")[0] for record in caplog.records] == ["train() again"] * first
