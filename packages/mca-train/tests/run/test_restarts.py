"""Ranks that torchrun starts again continue from their own checkpoints, else from where the run began."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from mca_config.errors import McaError
from mca_models.megatron.distributed.rendezvous import Attempt
from mca_train.run.restarts import StartRecorder, can_restart, resume_values


@pytest.fixture(autouse=True)
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def checkpoint(folder: Path, step: int) -> None:
    path = folder / f"checkpoint-{step}"
    shutil.rmtree(path, ignore_errors=True)
    (path / "training").mkdir(parents=True)
    (path / "trainer_state.json").write_text("{}")
    (path / "training" / "manifest.json").write_text('{"files": {}}')


def begins(store: HashStore, folder: Path, *, first: bool = True) -> None:
    args, state = SimpleNamespace(output_dir=str(folder)), SimpleNamespace(is_world_process_zero=first)
    StartRecorder(Attempt(1, store)).on_train_begin(args, state, None)


@pytest.fixture
def values(tmp_path):
    return {"output_dir": str(tmp_path), "resume_from_checkpoint": "elsewhere/checkpoint-7"}


def test_the_first_attempt_and_the_only_one_are_as_they_were_told(values):
    assert resume_values(values, Attempt(1, HashStore())) == values


def test_an_attempt_before_which_nothing_was_written_begins_as_the_first(values, tmp_path):
    store = HashStore()
    checkpoint(tmp_path, 4)  # of a run before
    assert resume_values(values, Attempt(2, store)) == values, "the first attempt died before it trained"
    begins(store, tmp_path)
    assert resume_values(values, Attempt(2, store)) == values
    (tmp_path / "checkpoint-5.partial-00000000").mkdir()
    assert resume_values(values, Attempt(3, store)) == values


def test_what_cannot_be_read_is_told_as_it_is(values):
    store = HashStore()
    store.set("mca/checkpoints_before", "[")
    with pytest.raises(McaError, match=r"^JSONDecodeError"):
        resume_values(values, Attempt(2, store))


@pytest.mark.parametrize("step", [4, 5])
def test_what_the_run_wrote_itself_is_gone_on_from(values, tmp_path, step):
    store = HashStore()
    checkpoint(tmp_path, 4)
    begins(store, tmp_path)
    keep = tmp_path / "checkpoint-4.set-aside"
    (tmp_path / "checkpoint-4").rename(keep)  # what stood there is another directory than what is written now
    checkpoint(tmp_path, step)
    begins(store, tmp_path)  # the second attempt finds it noted
    assert resume_values(values, Attempt(3, store)) == values | {"resume_from_checkpoint": "auto"}


def test_what_the_run_had_written_before_it_went_back_is_not_gone_on_from(values, tmp_path, caplog):
    """It died between its first checkpoint and setting later ones aside, which `auto` would take."""
    store = HashStore()
    for step in (100, 200, 300):
        checkpoint(tmp_path, step)
    begins(store, tmp_path)
    for step in (140, 150):
        checkpoint(tmp_path, step)
    resumed = resume_values(values, Attempt(2, store))
    assert resumed == values | {"resume_from_checkpoint": str(tmp_path / "checkpoint-150")}
    for step, found in ((150, 140), (140, 150)):  # where all are damaged, the last is refused by name
        (tmp_path / f"checkpoint-{step}" / "training" / "manifest.json").write_text("torn")
        resumed = resume_values(values, Attempt(2, store))
        assert resumed == values | {"resume_from_checkpoint": str(tmp_path / f"checkpoint-{found}")}
    assert "checkpoint-150 is damaged" in caplog.text
    for step in (200, 300):
        (tmp_path / f"checkpoint-{step}").rename(tmp_path / f"checkpoint-{step}.set-aside")
    assert resume_values(values, Attempt(2, store)) == values | {"resume_from_checkpoint": "auto"}


def test_one_rank_notes_what_stands_there(values, tmp_path):
    store = HashStore()
    begins(store, tmp_path, first=False)
    checkpoint(tmp_path, 1)
    assert resume_values(values, Attempt(2, store)) == values


def test_a_stopped_run_counts_as_failed_where_torchrun_starts_it_again(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    assert not can_restart()
    for restarts, again in (("0", False), ("3", True)):
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        assert can_restart() is again
