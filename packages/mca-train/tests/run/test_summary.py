from types import SimpleNamespace

import pytest

from mca_train.run.record import averages, summary

LOGS = [
    {"step": 10, "loss": 2.0, "step_time": 9.0, "tokens_per_second": 9.0, "model_tflops": 9.0, "mfu": 0.9},
    {"step": 20, "loss": 1.0, "step_time": 1.0, "tokens_per_second": 100.0, "model_tflops": 2.0, "mfu": 0.2},
    {"step": 20, "eval_loss": 1.5},
    {"step": 25, "loss": 1.0, "step_time": 4.0, "tokens_per_second": 40.0, "model_tflops": 0.5, "mfu": 0.05},
]


def test_speeds_are_means_over_time_of_the_steps_that_this_run_made():
    found = averages(LOGS, since=10)
    assert found["step_time"] == pytest.approx(30 / 15)
    assert found["tokens_per_second"] == pytest.approx((10 * 100 + 20 * 40) / 30)
    assert found["mfu"] == pytest.approx((10 * 0.2 + 20 * 0.05) / 30)
    assert averages(LOGS, since=25) == {}


def test_the_summary_says_what_was_done_how_fast_and_where_it_is():
    state = SimpleNamespace(log_history=LOGS, num_input_tokens_seen=1234567)
    args = SimpleNamespace(output_dir="runs/first", save_hf_model=True, load_best_model_at_end=False)
    result = SimpleNamespace(global_step=25, metrics={"train_runtime": 31.0}, training_loss=1.5)
    text = summary(SimpleNamespace(args=args, state=state, started_at_step=10), result)
    words = (
        "15 (11 to 25) in 31.0 s; 2 s for each, without saving and evaluating",
        "1,234,567 (60 per second)",
        "1 model TFLOP/s, MFU 10.0%",
        "1.500000",
    )
    for word in (*words, "runs/first/hf", "train_log.jsonl"):
        assert word in text


def test_the_evaluation_is_of_the_model_that_is_written():
    state = SimpleNamespace(
        log_history=[*LOGS, {"step": 25, "eval_loss": 8.0}],
        num_input_tokens_seen=1,
        best_model_checkpoint="runs/first/checkpoint-20",
        best_global_step=20,
    )
    args = SimpleNamespace(output_dir="runs/first", save_hf_model=False, load_best_model_at_end=True)
    result = SimpleNamespace(global_step=25, metrics={"train_runtime": 31.0}, training_loss=1.5)
    text = summary(SimpleNamespace(args=args, state=state, started_at_step=0), result)
    assert "1.500000 (the best, of step 20)" in text
    assert "25 in 31.0 s; " in text
    assert "8.0" not in text
