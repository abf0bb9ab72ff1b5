"""The lines that a person follows a run by."""

from types import SimpleNamespace

import pytest
from transformers import ProgressCallback

from mca_train.metrics.logs import StepLines, duration, format_log_line

STEP = {
    "loss": 2.34567,
    "grad_norm": 1.2345,
    "rewards/margins": 0.5,
    "learning_rate": 1e-4,
    "tokens_per_second": 12345.6,
    "samples_per_second": 3.0,
    "step_time": 2.0,
    "peak_memory_gib": 1.234,
    "pipeline_bubble": 0.2,
    "model_tflops": 0.1,
    "epoch": 0.1,
}


def test_a_step_is_one_line_without_what_never_changes():
    assert format_log_line(STEP, 10, 200) == (
        "step  10/200  loss 2.3457  lr 1.00e-04  norm 1.23  rewards/margins 0.5  12,346 tokens/s  1.2 GiB  "
        "6 min 20 s left"
    )
    assert "left" not in (format_log_line(STEP, 200, 200) or "")
    assert (format_log_line(STEP, 199, 200) or "").endswith("2.0 s left")
    skipped = {"learning_rate": 1e-4, "skipped_steps": 1, "tokens_per_second": 12.0}
    assert format_log_line(skipped, 10, 20) == "step 10/20  lr 1.00e-04  skipped_steps 1  12 tokens/s"


def test_an_evaluation_is_one_line_and_the_end_is_the_summary():
    logs = {"eval_loss": 1.5, "eval_runtime": 2.5, "eval_samples_per_second": 4.0, "epoch": 1.0}
    assert format_log_line(logs, 5, 10) == "step  5/10  eval_loss 1.5000  in 2.5 s"
    assert format_log_line(logs, 0, 0) == "eval_loss 1.5000  in 2.5 s"
    pairs = {"rewards/margins": 0.5, "rewards/chosen": 0.25, "logps/rejected": -9.0}
    assert format_log_line({"loss": 1.5} | pairs, 5, 10) == "step  5/10  loss 1.5000  rewards/margins 0.5"
    evaluated = {f"eval_{name}": value for name, value in pairs.items()}
    assert format_log_line(evaluated, 5, 10) == "step  5/10  eval_rewards/margins 0.5000"
    assert format_log_line({"train_runtime": 3.0, "train_loss": 1.0}, 10, 10) is None


@pytest.mark.parametrize(
    ("seconds", "reported"),
    [
        *((0.25, "0.2 s"), (9.94, "9.9 s"), (10.4, "10 s"), (42.4, "42 s"), (59.4, "59 s")),
        *((59.7, "1 min 00 s"), (61, "1 min 01 s"), (200, "3 min 20 s"), (3599.4, "59 min 59 s")),
        *((3599.6, "1 h 00 min"), (7199, "1 h 59 min"), (18180, "5 h 03 min")),
    ],
)
def test_durations_are_as_people_say_them(seconds, reported):
    assert duration(seconds) == reported


def test_a_line_has_the_utilization_and_the_slowest_rank():
    logs = {"loss": 1.0, "mfu": 0.4567, "slowest_rank": 3, "slowest_rank_behind": 0.125, "step_time": 2.0}
    assert (
        format_log_line(logs, 3, 8) == "step 3/8  loss 1.0000  rank 3 is 0.12 s behind  MFU 45.7%  10 s left"
    )
    assert format_log_line({"epoch": 1.0}, 3, 8) is None, "nothing to show"
    assert (
        format_log_line({"eval_a": 2.0, "eval_b": "words", "test_runtime": 0.0}, 3, 8)
        == "step 3/8  eval_a 2.0000"
    )


def test_a_bar_is_drawn_where_it_is_asked_for(monkeypatch):
    """Lines are written above it while the run lasts."""
    calls = []
    for name in ("on_train_begin", "on_step_end", "on_prediction_step", "on_train_end"):

        def note(self, *given, name=name, **more):
            calls.append((name, *given, *sorted(more.items())))

        monkeypatch.setattr(ProgressCallback, name, note)
    state = SimpleNamespace(is_world_process_zero=False, global_step=0, max_steps=8)
    for bar in (False, True):
        lines = StepLines(bar=bar)
        lines.on_train_begin("args", state, "control")
        lines.on_step_end("args", state, "control")
        lines.on_prediction_step("args", state, "control", eval_dataloader="loader")
        lines.on_train_end("args", state, "control")
    given = ("args", state, "control")
    assert calls == [
        *((name, *given) for name in ("on_train_begin", "on_step_end", "on_step_end")),
        ("on_prediction_step", *given, ("eval_dataloader", "loader")),
        ("on_train_end", *given),
    ]


def test_lines_are_written_above_a_bar_or_at_once(monkeypatch):
    written = []
    stream = SimpleNamespace(write=written.append, flush=lambda: written.append("flush"))
    monkeypatch.setattr("sys.stdout", stream)
    lines = StepLines(bar=False)
    lines._print("first")
    lines.training_bar = SimpleNamespace(write=lambda line: written.append(("above", line)))
    lines._print("second")
    assert written == ["first\n", "flush", ("above", "second")]


@pytest.mark.parametrize("bar", [False, True])
def test_a_resumed_run_begins_with_its_step(bar, capsys):
    lines, args = StepLines(bar=bar), SimpleNamespace(output_dir="runs", max_steps=8)
    for step, first in ((0, True), (4, False), (4, True)):
        state = SimpleNamespace(is_world_process_zero=first, global_step=step, max_steps=8)
        lines.on_train_begin(args, state, None)
        lines.on_train_end(args, state, None)
    assert capsys.readouterr().out.splitlines() == ["resuming after step 4 of 8"]


def test_other_ranks_print_nothing_and_the_first_says_what_it_saves(capsys):
    lines, args = StepLines(bar=False), SimpleNamespace(output_dir="runs")
    for first in (False, True):
        state = SimpleNamespace(is_world_process_zero=first, global_step=4, max_steps=8)
        lines.on_log(args, state, None, logs=dict(STEP))
        lines.on_save(args, state, None)
    out, err = capsys.readouterr()
    assert [line.split()[:2] for line in out.splitlines()] == [
        ["step", "4/8"],
        ["saved", "runs/checkpoint-4"],
    ]
    assert not err
