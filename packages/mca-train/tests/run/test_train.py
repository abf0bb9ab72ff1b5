"""Work of the process that starts ranks, and the end of a rank."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_models.megatron import platform
from mca_train.cli import main
from mca_train.config.arguments import DataArguments, LaunchArguments
from mca_train.config.model import local_world_size
from mca_train.launch.environment import is_first
from mca_train.run import record, train


class Seen(Exception):
    """Ends a call once it has been looked at."""


def test_the_process_that_starts_ranks_leaves_their_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(task: Any, values: dict[str, Any], where: str) -> None:
        raise Seen(values)

    monkeypatch.setattr(train, "make_settings", parse)
    task: Any = SimpleNamespace()
    for device, expected in (("cuda", {"seed": 1, "use_cpu": True}), ("cpu", {"seed": 1})):
        monkeypatch.setattr(platform, "device_type", lambda device=device: device)
        with pytest.raises(Seen) as seen:
            train._launch(task, {"seed": 1}, "run.yaml", [])
        assert seen.value.args == (expected,)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [("2", {}), ("1", {}), ("2", {"tokenized_cache": "kept"}), ("2", {"streaming": True})],
)
def test_ranks_that_each_tokenize_all_rows_say_so(
    ranks: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    settings: Any = SimpleNamespace(data=DataArguments(model_name_or_path="m", **changes))
    reported = train._tokenized_cache_hint(settings)
    expected = (
        "each of the 2 ranks here tokenizes all rows; with tokenized_cache DIR one rank does it for all"
    )
    assert reported == (expected if ranks == "2" and not changes else None)


@pytest.mark.parametrize(
    ("variables", "values", "message"),
    [
        ({"RANK": "x"}, {}, "RANK is 'x'; expected a number"),
        ({"RANK": "0"}, {}, "MASTER_ADDR and MASTER_PORT must be set"),
        (
            {"RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            {"ddp_timeout": "30m"},
            "ddp_timeout must be an integer, not '30m'",
        ),
    ],
)
def test_a_rank_that_cannot_join_the_others_says_why_in_one_line(
    variables: dict[str, str],
    values: dict[str, str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    for name, value in {"WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "run.yaml"
    file.write_text("".join(f"{name}: {value}\n" for name, value in {"output_dir": "out", **values}.items()))
    assert main(["sft", str(file)]) in (1, 2)
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("asked", "device", "gpus", "expected"),
    [
        (None, "cuda", 4, 4),
        (2, "cuda", 4, 2),
        (8, "cuda", 4, None),
        (8, "cpu", 0, 8),
        (8, "cpu", 4, 8),  # MCA_DEVICE=cpu beside GPUs
        (None, "cpu", 4, 1),
    ],
)
def test_ranks_to_start_are_at_most_the_gpus_that_they_run_on(
    asked: int | None, device: str, gpus: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(platform, "device_type", lambda: device)
    launch = LaunchArguments(nproc_per_node=asked)
    if expected is not None:
        assert local_world_size(launch, ParallelLayout()) == expected
        return
    with pytest.raises(McaError, match="nproc_per_node 8 is above 4, the number of visible GPUs"):
        local_world_size(launch, ParallelLayout())


@pytest.mark.parametrize(
    ("variables", "first"),
    [({}, True), ({"RANK": "3"}, True), ({"RANK": "3", "WORLD_SIZE": "4"}, False), ({"RANK": "0"}, True)],
)
def test_who_starts_ranks_speaks_for_them_whatever_rank_was_left_behind(
    variables: dict[str, str], first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_first() is first


def test_a_rank_that_has_ended_has_no_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(train, "_train", lambda inputs, attempt: None)
    monkeypatch.setattr(train, "set_log_levels", lambda training: None)
    settings = SimpleNamespace(training=None)
    inputs: Any = SimpleNamespace(
        run=SimpleNamespace(settings=settings), lock=SimpleNamespace(heartbeat=nullcontext)
    )
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        train._train_rank(inputs, None)
        assert not torch.distributed.is_initialized()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("step", "steps", "reported"),
    [
        (
            *(3, 8),
            [
                "stopped by SIGTERM after step 3 of 8; complete checkpoint: out/checkpoint-3",
                "continue with --resume_from_checkpoint auto",
            ],
        ),
        # auto would begin at step 0 where the run was to go on from a checkpoint in another directory
        (0, 0, ["stopped by SIGTERM before the first step", "start it again with the same command"]),
    ],
)
def test_a_stopped_run_says_how_it_goes_on(step: int, steps: int, reported: list[str]) -> None:
    state = SimpleNamespace(global_step=step, max_steps=steps)
    trainer: Any = SimpleNamespace(state=state, args=SimpleNamespace(output_dir="out"))
    assert train._stop_message(trainer).splitlines() == reported


def test_a_run_that_cannot_be_planned_is_recorded_without_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def images(run: object) -> None:
        raise ZeroDivisionError("integer division by zero")

    monkeypatch.setattr(record, "planned_media", images)
    monkeypatch.setattr(record, "choose_implementation", lambda args: None)
    run: Any = SimpleNamespace(
        settings=SimpleNamespace(training=SimpleNamespace(output_dir=str(tmp_path)), values={}),
        task=SimpleNamespace(name="sft"),
        world_size=2,
        layout=ParallelLayout(),
    )
    with caplog.at_level("WARNING"):
        record.write_record(run)
    found = json.loads((tmp_path / "run.json").read_text())
    assert (found["world_size"], found["plan"]) == (2, None)
    assert "run.json has no plan of this run: ZeroDivisionError: integer division by zero" in caplog.text
