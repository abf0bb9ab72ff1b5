"""``train_log.jsonl``: what a run says of itself, which no run fails for."""

import json
import shutil
from types import SimpleNamespace

from mca_train.metrics.logs import JsonlLog


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


def test_rounds_of_one_trainer_stand_one_after_the_other(tmp_path):
    log, path = JsonlLog(), tmp_path / "train_log.jsonl"
    places = [(None, step) for step in (1, 2, 3)] + [(1, step) for step in (1, 2, 3)]
    run(tmp_path, log=log)
    run(tmp_path, log=log)
    assert [(line.get("rounds_before"), line["step"]) for line in map(json.loads, path.open())] == places
    resumed = JsonlLog()
    vars(resumed).update(log.state()["attributes"])  # as from the checkpoint of step 1 of the second
    run(tmp_path, first=1, log=resumed)
    found = [(line.get("rounds_before"), line["step"]) for line in map(json.loads, path.open())]
    assert found == [*places[:4], (1, 2), (1, 3), (1, 4)]
    run(tmp_path)  # another run
    assert len(path.read_text().splitlines()) == 3


def test_a_log_that_cannot_be_written_is_told_once(tmp_path, caplog):
    (tmp_path / "train_log.jsonl").mkdir()  # stands for a full disk
    run(tmp_path, first=1)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/train_log.jsonl: cannot be written (Is a directory); logs are lost until it can be written again"
    ]


def test_a_resumed_run_takes_out_lines_that_are_not_whole_or_of_no_checkpoint(tmp_path, caplog):
    """A run that was killed leaves half a line, and lines of the checkpoint's step that came after the checkpoint."""
    path = tmp_path / "train_log.jsonl"
    whole = [b'{"step": 1, "loss": 1.0}', b'{"step": 2, "loss": 2.0}', b'{"step": 2, "eval_loss": 9.0}']
    path.write_bytes(b"\n".join([*whole, b"\xff\xfe", b"[" * 99999, b'{"step": 3, "lo']))
    state = SimpleNamespace(is_world_process_zero=True, global_step=2, log_history=[{"step": 1}, {"step": 2}])
    JsonlLog().on_train_begin(SimpleNamespace(output_dir=str(tmp_path)), state, None)
    assert path.read_bytes().splitlines() == whole[:2]
    (reported,) = [record.getMessage() for record in caplog.records]
    assert reported == f"{path}: removed 3 incomplete lines (was a run killed?)"


def test_a_log_makes_a_folder_that_was_deleted(tmp_path):
    log, folder = JsonlLog(), tmp_path / "of" / "a" / "run"
    run(folder, log=log)
    shutil.rmtree(tmp_path / "of")
    state = SimpleNamespace(is_world_process_zero=True, global_step=4)
    log.on_log(SimpleNamespace(output_dir=str(folder)), state, None, logs={"loss": 4.0})
    assert json.loads((folder / "train_log.jsonl").read_text())["step"] == 4
