"""``train_log.jsonl``: what a run says of itself, which no run fails for."""

import json
from types import SimpleNamespace

from mca_train.hf_glue import JsonlLog


def run(folder, first=0, log=None):
    log = log or JsonlLog()
    args = SimpleNamespace(output_dir=str(folder))
    log.on_train_begin(args, SimpleNamespace(is_world_process_zero=True, global_step=first), None)
    for step in range(first + 1, first + 4):
        state = SimpleNamespace(is_world_process_zero=True, global_step=step)
        log.on_log(args, state, None, logs={"loss": float(step)})


def test_a_resumed_run_takes_out_what_came_after_its_checkpoint(tmp_path):
    run(tmp_path)
    run(tmp_path, first=2)
    lines = [json.loads(line) for line in (tmp_path / "train_log.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)]
    assert [path.name for path in tmp_path.iterdir()] == ["train_log.jsonl"]


def test_a_log_that_cannot_be_written_is_told_once(tmp_path, caplog):
    (tmp_path / "train_log.jsonl").mkdir()  # stands for a full disk
    run(tmp_path, first=1)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/train_log.jsonl: cannot be written (Is a directory); logs are lost until it can"
    ]
