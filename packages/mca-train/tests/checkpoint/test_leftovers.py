"""Leftovers of saves that were killed."""

from pathlib import Path

import pytest

from mca_train.checkpoint import writer


def test_leftovers_of_each_checkpoint_are_removed_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[Path] = []
    monkeypatch.setattr(writer, "remove_leftovers", removed.append)
    for name in (
        "checkpoint-3",
        "checkpoint-4.partial-0a",
        "checkpoint-5.partial-x.partial-y",
        "other-6.partial-0a",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint.partial-0a").write_text("")
    writer.remove_unfinished(tmp_path, "checkpoint")
    assert sorted(removed) == [tmp_path / "checkpoint-4", tmp_path / "checkpoint-5"]
    removed.clear()
    writer.remove_unfinished(tmp_path / "absent", "checkpoint")
    assert removed == []
