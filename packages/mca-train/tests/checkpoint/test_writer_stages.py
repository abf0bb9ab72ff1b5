"""Stages of a checkpoint that is written, and leftovers of those that were killed."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mca_config.errors import McaError
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


class Stage:
    """A write that is done after some questions."""

    def __init__(
        self, name: str, notes: list[Any], questions: int = 0, error: Exception | None = None
    ) -> None:
        self.name, self.notes, self.questions, self.error = name, notes, questions, error

    def done(self) -> bool:
        self.questions -= 1
        return self.questions < 0

    def finish(self) -> None:
        self.notes.append(self.name)
        if self.error is not None:
            raise self.error


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    def shared(destination: Path, *, overwrite: bool) -> Any:
        assert overwrite
        return SimpleNamespace(
            path=destination / "partial",
            publish=lambda: found.append("publish"),
            discard=lambda: found.append("discard"),
        )

    monkeypatch.setattr(writer, "SharedDirectory", shared)
    monkeypatch.setattr(writer, "raise_save_errors", contextlib.nullcontext)
    return found


def test_a_checkpoint_is_published_after_its_last_stage(tmp_path: Path, notes: list[Any]) -> None:
    made = writer.CheckpointWriter(in_background=True)

    def begin(path: Path) -> list[Any]:
        assert path == tmp_path / "partial"
        return [Stage("weights", notes), Stage("optimizer", notes, 2)]

    made.write(tmp_path, begin, lambda: notes.append("reported"))
    assert notes == [] and made.written == []
    made.advance()
    assert notes == ["weights"]
    made.advance()
    assert notes == ["weights"] and made.written == []
    made.advance()
    assert notes == ["weights", "optimizer", "publish", "reported"] and made.written == [tmp_path]
    made.advance()
    made.write(tmp_path / "b", lambda path: [Stage("one", notes, 9)], lambda: notes.append("b"))
    made.write(tmp_path / "c", lambda path: [Stage("two", notes, 9)], lambda: notes.append("c"))
    assert notes[4:] == ["one", "publish", "b"], "one at a time"
    made.finish()
    assert made.written == [tmp_path, tmp_path / "b", tmp_path / "c"]


def test_without_a_background_a_checkpoint_is_complete_at_once(tmp_path: Path, notes: list[Any]) -> None:
    made = writer.CheckpointWriter(in_background=False)
    made.write(tmp_path, lambda path: [Stage("weights", notes, 5)], lambda: notes.append("reported"))
    assert notes == ["weights", "publish", "reported"]


def test_a_stage_that_fails_leaves_nothing(tmp_path: Path, notes: list[Any]) -> None:
    made = writer.CheckpointWriter(in_background=True)
    stages = [Stage("weights", notes, error=OSError("broken")), Stage("optimizer", notes)]
    made.write(tmp_path, lambda path: stages, lambda: notes.append("reported"))
    with pytest.raises(OSError, match="broken"):
        made.finish()
    assert notes == ["weights", "discard"] and made.written == [] and made._stages == []
    with pytest.raises(McaError, match="wrong"), made.finishing_on_error():
        made.write(tmp_path, lambda path: [Stage("again", notes, 9)], lambda: notes.append("reported"))
        raise McaError("wrong")
    assert notes[2:] == ["again", "publish", "reported"]
    with pytest.raises(KeyError), made.finishing_on_error():
        made.write(tmp_path, lambda path: [Stage("last", notes, 9)], lambda: None)
        raise KeyError
    assert notes[-1] == "reported"
    made.abandon()
    assert notes[-1] == "discard"
