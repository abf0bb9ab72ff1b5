"""The best checkpoint of a run that goes on with another metric."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mca_config.errors import McaError
from mca_train.checkpoint import directory, integrity
from mca_train.checkpoint.directory import reset_best_metric
from mca_train.checkpoint.output_files import STATE_FILE


@pytest.mark.parametrize(
    ("metric", "best", "reset"),
    [
        ("eval_loss", 2.0, False),
        ("eval_accuracy", 2.0, True),
        ("eval_accuracy", None, False),
        (None, 2.0, False),
    ],
)
def test_the_best_metric_is_forgotten_if_another_one_is_followed(
    tmp_path: Path, metric: str | None, best: float | None, reset: bool
) -> None:
    saved = {"metric_for_best_model": "eval_loss", "greater_is_better": False}
    (tmp_path / integrity.ARGUMENTS_FILE).write_text(json.dumps(saved))
    state: Any = SimpleNamespace(best_metric=best, best_model_checkpoint="checkpoint-2", best_global_step=2)
    args: Any = SimpleNamespace(metric_for_best_model=metric, greater_is_better=None)
    assert reset_best_metric(state, tmp_path, args) is reset
    kept = (best, "checkpoint-2", 2)
    found = (state.best_metric, state.best_model_checkpoint, state.best_global_step)
    assert found == ((None, None, None) if reset else kept)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checkpoints after 2, 9 and 10 steps, an incomplete one after 12, and another directory."""
    monkeypatch.setattr(directory, "run_on_first_rank", lambda call: call())
    for step in (9, 10, 2, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if step != 12:
            (tmp_path / f"checkpoint-{step}" / STATE_FILE).write_text("{}")
    (tmp_path / "checkpoint-x").mkdir()
    return tmp_path


def damaged(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    names = {f"checkpoint-{step}" for step in steps}

    def faults(path: Path, rank: int, size: int) -> list[str]:
        assert (rank, size) == (3, 4)
        return ["a", "b"] if path.name in names else []

    monkeypatch.setattr(integrity, "faults", faults)


RANKS: Any = SimpleNamespace(rank=3, world_size=4)


@pytest.mark.parametrize("resume", [True, "last", "auto"])
@pytest.mark.parametrize(("broken", "step"), [((), 10), ((10,), 9), ((10, 9), 2), ((9,), 10)])
def test_the_newest_checkpoint_that_is_whole_is_resumed(
    resume: Any,
    broken: tuple[int, ...],
    step: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
) -> None:
    damaged(monkeypatch, *broken)
    assert directory.find(resume, folder, RANKS) == folder / f"checkpoint-{step}"
    tried = [each for each in caplog.messages if "trying the checkpoint before it" in each]
    assert len(tried) == len([each for each in broken if each > step])
    assert all("is damaged: a; b; trying" in each for each in tried)
    incomplete = [each for each in caplog.messages if "is incomplete and ignored" in each]
    assert len(incomplete) == 1 and "checkpoint-12 has no" in incomplete[0]


def test_a_named_checkpoint_is_resumed_or_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    damaged(monkeypatch, 9)
    assert directory.find(str(folder / "checkpoint-2"), folder, RANKS) == folder / "checkpoint-2"
    with pytest.raises(McaError, match=r"^resume_from_checkpoint: .*checkpoint-9 is damaged: a; b$"):
        directory.find(str(folder / "checkpoint-9"), folder, RANKS)
    assert directory.find(None, folder, RANKS) is None and caplog.messages == []
    damaged(monkeypatch, 2, 9, 10)
    with pytest.raises(McaError) as error:
        directory.find("last", folder, RANKS)
    assert [line.rpartition("checkpoint-")[2] for line in str(error.value).splitlines()] == [
        f"{step} is damaged: a; b" for step in (10, 9, 2)
    ]


def test_one_damaged_checkpoint_has_none_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(directory, "run_on_first_rank", lambda call: call())
    with caplog.at_level("INFO"):
        assert directory.find("auto", tmp_path, RANKS) is None
    assert caplog.messages == [f"no complete checkpoint in {tmp_path}: starting from the beginning"]
    caplog.clear()
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / STATE_FILE).write_text("{}")
    damaged(monkeypatch, 5)
    with pytest.raises(McaError, match="checkpoint-5 is damaged"):
        directory.find("auto", tmp_path, RANKS)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("limit", "best", "deleted"),
    [
        (None, None, []),
        (0, None, []),
        (3, None, []),
        (2, None, [2]),
        (1, None, [2, 9]),
        (1, 2, [9]),
        (2, 2, [9]),
        (1, 10, [2, 9]),
        (5, None, []),
    ],
)
def test_the_newest_and_the_best_checkpoint_stay(
    limit: int | None, best: int | None, deleted: list[int], folder: Path
) -> None:
    keep = None if best is None else f"{folder}/./checkpoint-{best}"
    found = directory.checkpoints_to_delete(folder, limit, keep)
    assert found == [folder / f"checkpoint-{step}" for step in deleted]


@pytest.mark.parametrize(
    ("moved", "exists", "kept"), [(True, True, "here"), (False, True, "there"), (False, False, None)]
)
def test_the_best_checkpoint_is_next_to_the_resumed_one(
    moved: bool, exists: bool, kept: str | None, tmp_path: Path
) -> None:
    for name, is_made in (("here", moved), ("there", exists)):
        if is_made:
            (tmp_path / name / "checkpoint-2").mkdir(parents=True)
    state: Any = SimpleNamespace(
        best_model_checkpoint=str(tmp_path / "there/checkpoint-2"), best_metric=1.0, best_global_step=2
    )
    directory.locate_best(state, tmp_path / "here/checkpoint-4")
    assert state.best_model_checkpoint == (None if kept is None else str(tmp_path / kept / "checkpoint-2"))
    assert (state.best_metric, state.best_global_step) == ((None, None) if kept is None else (1.0, 2))
    none: Any = SimpleNamespace(best_model_checkpoint=None, best_metric=3.0)
    directory.locate_best(none, tmp_path)
    assert none.best_metric == 3


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_damaged_checkpoint_but_a_lone_one_is_reported_as_it_is_tried(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(directory, "run_on_first_rank", lambda call: call())
    for step in range(1, count + 1):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / STATE_FILE).write_text("{}")
    damaged(monkeypatch, *range(1, count + 1))
    with pytest.raises(McaError):
        directory.find("auto", tmp_path, RANKS)
    assert len(caplog.messages) == (count if count > 1 else 0)


def test_a_first_checkpoint_that_is_incomplete_is_named(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    directory._warn_incomplete(tmp_path, None)
    (message,) = caplog.messages
    assert "checkpoint-1 has no" in message
