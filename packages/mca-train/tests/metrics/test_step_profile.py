"""The steps that are profiled, and what stands in the files."""

import gzip
import json
import logging
from types import SimpleNamespace

import torch

from mca_train.metrics.step_profile import StepProfile


def run(callback, folder, steps, *, begin=0, ranks=None, first=2, last=3):
    args = SimpleNamespace(
        output_dir=str(folder), profile_step_start=first, profile_step_end=last, profile_ranks=ranks
    )
    state = SimpleNamespace(global_step=begin, max_steps=begin + steps)
    callback.on_train_begin(args, state, None)
    for step in range(begin + 1, begin + steps + 1):
        callback.on_step_begin(args, state, None)
        torch.ones(step, step) @ torch.ones(step, step)
        state.global_step = step
        callback.on_step_end(args, state, None)
    callback.on_train_end(args, state, None)


def sizes(folder, rank=0):
    """The shapes of the products that stand in the trace: the step, as `run` makes them."""
    trace = json.loads(gzip.decompress((folder / "profile" / f"rank_{rank:05d}.json.gz").read_bytes()))
    events = [event for event in trace["traceEvents"] if event.get("name") == "aten::mm"]
    return [event["args"]["Input Dims"][0][0] for event in events]


def test_the_steps_that_are_asked_for_stand_in_the_trace(tmp_path, capsys):
    run(StepProfile(0), tmp_path, 5)
    assert sizes(tmp_path) == [2, 3]
    reported = capsys.readouterr().out
    assert "aten::mm" in reported
    assert f"profile: {tmp_path}/profile/rank_00000.json.gz" in reported
    assert "aten::mm" in (tmp_path / "profile" / "rank_00000.txt").read_text()
    assert not list((tmp_path / "profile").glob(".*"))
    run(StepProfile(1), tmp_path, 5)
    assert sizes(tmp_path, 1) == [2, 3], "ranks share the folder"


def test_a_resumed_run_counts_its_own_steps_and_a_short_one_writes_what_it_has(tmp_path):
    run(StepProfile(1), tmp_path, 2, begin=20)
    assert sizes(tmp_path, 1) == [22]


def test_other_ranks_record_nothing(tmp_path, capsys):
    run(StepProfile(1), tmp_path, 5, ranks=[0])
    assert not (tmp_path / "profile").exists()
    run(StepProfile(3), tmp_path, 5, ranks=[0, 3])
    assert sizes(tmp_path, 3) == [2, 3]
    assert capsys.readouterr().out == "", "the first rank alone prints its table"


def test_a_run_that_is_too_short_is_reported(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        run(StepProfile(0), tmp_path, 5, first=10, last=12)
    assert "profile_step_start is 10, but this run has 5 steps" in caplog.text


def test_a_trainer_that_trains_again_profiles_its_first_run_alone(tmp_path):
    callback = StepProfile(0)
    run(callback, tmp_path / "first", 3)
    run(callback, tmp_path / "second", 3)
    assert sizes(tmp_path / "first") == [2, 3]
    assert not (tmp_path / "second").exists()


def test_only_the_first_rank_of_a_run_whose_steps_are_too_few_reports_it(caplog):
    """Steps of a resumed run are counted from its start; a run that has nothing to train says so itself."""
    args = SimpleNamespace(profile_step_start=4)
    for rank, begin, steps, is_reported in (
        (0, 20, 3, True),
        (0, 20, 4, False),
        (0, 20, 0, False),
        (1, 20, 3, False),
    ):
        caplog.clear()
        state = SimpleNamespace(global_step=begin, max_steps=begin + steps)
        StepProfile(rank).on_train_begin(args, state, None)
        assert ("this run has 3 steps" in caplog.text) == is_reported
