"""Processes that die, disks that fill, files that rot: the last complete checkpoint is found, or what broke is said."""

import json
import os
import random
import shutil
import signal
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from harness import RanksFailed, run_ranks
from train_cases import history, make_trainer, quietly, tiny_checkpoint
from train_settings import ASYNC, ZERO

pytestmark = [pytest.mark.ranks, pytest.mark.one_fork]

STEPS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


def go_on(checkpoint: Path, output_dir: Path, ready: Any = lambda: None, **changes: Any) -> dict[str, Any]:
    """Trains to the end from the last complete checkpoint, with one at every step; says what it reported."""
    import logging

    settings = {
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": STEPS,
        "gradient_accumulation_steps": 2,
    }
    trainer = make_trainer(checkpoint, output_dir, **settings | changes)
    reported: list[str] = []
    logging.disable(logging.NOTSET)
    handler = logging.Handler()
    handler.emit = lambda record: reported.append(record.getMessage())
    logging.getLogger("mca_train").addHandler(handler)
    ready()
    start = time.monotonic()
    quietly(lambda: trainer.train(resume_from_checkpoint="auto"))
    seconds = time.monotonic() - start
    curve = [history(trainer, key) for key in ("loss", "grad_norm", "learning_rate", "epoch")]
    damaged = [line for line in reported if "damaged" in line or "and ignored" in line]
    return {"loss": curve[0], "curve": curve, "reported": damaged, "seconds": seconds}


@pytest.fixture(scope="module")
def finished(checkpoint, tmp_path_factory):
    """A finished run with checkpoints, and its losses."""
    folder = tmp_path_factory.mktemp("run")
    return folder, run_ranks(1, go_on, checkpoint, folder)[0]["loss"]


def count_touches(output_dir: Path, act: Any) -> None:
    """Calls ``act`` with 1, 2, ... whenever this process is about to touch a file in ``output_dir``."""
    import itertools
    import sys

    count, here, pid = itertools.count(1), str(output_dir), os.getpid()

    def hear(event: str, args: tuple[Any, ...]) -> None:
        if not event.startswith(("open", "os.", "shutil.")) or os.getpid() != pid:
            return
        if any(isinstance(arg, (str, Path)) and str(arg).startswith(here) for arg in args):
            act(next(count))

    sys.addaudithook(hear)


def uninterrupted(checkpoint: Path, output_dir: Path, **changes: Any) -> dict[str, Any]:
    """A whole run: what it logged, and how long and through how many touches of files it lasts."""
    touched: list[int] = []
    found = go_on(checkpoint, output_dir, lambda: count_touches(output_dir, touched.append), **changes)
    return found | {"touches": len(touched)}


def killed(checkpoint: Path, output_dir: Path, seed: int, whole: list[Any], **changes: Any) -> None:
    """`go_on`, but one rank kills itself: by turns at a touch of a file and at a moment that the seed chooses."""
    import torch.distributed as dist

    draw = random.Random(f"{seed} of {len(SEEDS)}")
    victim, share = draw.randrange(dist.get_world_size()), draw.random()

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def ready() -> None:
        if dist.get_rank() != victim:
            return
        if seed % 2:
            last = share * whole[victim]["touches"]
            count_touches(output_dir, lambda count: die() if count >= last else None)
        else:
            threading.Timer(share * whole[victim]["seconds"], die).start()

    go_on(checkpoint, output_dir, ready, **changes)
    time.sleep(30)  # a run that was faster this time dies after its end


SEEDS = range(
    int(os.environ.get("MCA_TEST_KILLS", "0"))
)  # even ones kill at the touch of a file, odd ones at a time
EPOCHS = {"count": 5}  # of 2.5 steps: kills in the middle of one
TWO = EPOCHS | ZERO | {"gradient_accumulation_steps": 1}
SAVED = {"one rank": (1, EPOCHS), "two ranks": (2, TWO), "two ranks in background": (2, TWO | ASYNC)}
KILLED = SAVED | {
    "two ranks": (2, TWO | {"save_hf_model": True}),
    "two ranks in background": (2, TWO | ASYNC | {"save_total_limit": 1}),
}


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory):
    """By name in `KILLED`: what every rank logs of a run that nothing interrupts."""
    return cache(
        lambda name: run_ranks(
            KILLED[name][0], uninterrupted, checkpoint, tmp_path_factory.mktemp("whole"), **KILLED[name][1]
        )
    )


@pytest.mark.cases(0, always=["two ranks"])
@pytest.mark.parametrize("name", KILLED if SEEDS else ("two ranks", "two ranks in background"))
def test_killed_runs_go_on_from_their_last_complete_checkpoint(name, whole, checkpoint, tmp_path):
    """Twenty times with MCA_TEST_KILLS=20, also one rank. Every SIGKILL also leaves an incomplete directory."""
    from mca_train.checkpoint.output_files import checkpoints

    size, changes = KILLED[name]
    for seed in SEEDS or {"two ranks": [0], "two ranks in background": [1]}[name]:
        folder = tmp_path / str(seed)
        with pytest.raises(RanksFailed, match="died without a word"):
            run_ranks(size, killed, checkpoint, folder, seed, whole(name), timeout=60, **changes)
        found = [int(path.name.split("-")[1]) for path in checkpoints(folder)]
        for path in checkpoints(folder) if changes.get("save_hf_model") else ():
            assert parameters(path / "hf") == parameters(checkpoint)
        lost = last_logged(folder) - max(found, default=0)
        assert lost <= (2 if changes.get("async_save") else 1), (
            "a checkpoint is complete before the next begins"
        )
        for resumed in run_ranks(size, go_on, checkpoint, folder, **changes):
            assert resumed["curve"] == whole(name)[0]["curve"]
            assert not resumed["reported"]
        assert not list(folder.glob("*.partial-*"))


def parameters(folder: Path) -> dict[str, Any]:
    """Shapes by name of a model that transformers would load."""
    from safetensors.torch import load_file

    assert (folder / "config.json").is_file()
    return {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}


def last_logged(folder: Path) -> int:
    log = folder / "train_log.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, copy_function=os.link)
    return target


def spoil(path: Path, how: Any) -> Path:
    whole = path.read_bytes()
    path.unlink()  # the copy is a hard link
    if how is not None:
        path.write_bytes(whole)
        how(path)
    return path


DAMAGES = {"truncated": truncate, "flipped": flip, "lost": None}


def find_all(folders: dict[str, Path]) -> dict[str, tuple[str, str]]:
    """Return the checkpoint that ``auto`` finds in each folder, and the error of naming the damaged one."""
    from mca_config.errors import McaError
    from mca_config.layout import ParallelLayout
    from mca_models.megatron.distributed import parallel
    from mca_train import groups
    from mca_train.checkpoint import directory

    parallel.start(ParallelLayout())
    ranks = groups.current_ranks(ParallelLayout())
    found = {}
    for name, folder in folders.items():
        auto = directory.find("auto", folder, ranks)
        try:
            directory.find(str(folder / f"checkpoint-{STEPS}"), folder, ranks)
            reported = "nothing"
        except McaError as error:
            reported = str(error)
        found[name] = (auto.name if auto else "none", reported)
    return found


@pytest.mark.cases(0, always=["mca"])
@pytest.mark.parametrize("ckpt_format", ["mca", "torch_dist"])
def test_any_damage_to_any_file_is_reported_and_the_checkpoint_before_is_taken(
    ckpt_format, checkpoint, finished, tmp_path
):
    source = finished[0] if ckpt_format == "mca" else tmp_path / "source"
    if ckpt_format != "mca":
        run_ranks(1, go_on, checkpoint, source, ckpt_format=ckpt_format)
    last = source / f"checkpoint-{STEPS}"
    files = sorted(path.relative_to(last) for path in last.rglob("*") if path.is_file())
    assert len(files) >= 13
    assert sum(file.suffix in (".safetensors", ".distcp") for file in files) >= 3
    spoilt = {}
    for file in files:
        for how, damage in DAMAGES.items():
            name = f"{file} {how}".replace("/", "_")
            for step in (STEPS - 1, STEPS):
                copy(source / f"checkpoint-{step}", tmp_path / name / f"checkpoint-{step}")
            spoilt[name] = spoil(tmp_path / name / f"checkpoint-{STEPS}" / file, damage)
    for step in (STEPS - 1, STEPS):
        whole = copy(source / f"checkpoint-{step}", tmp_path / "no training" / f"checkpoint-{step}")
    spoilt["no training"] = whole / "training"
    shutil.rmtree(whole / "training")
    (found,) = run_ranks(1, find_all, {name: tmp_path / name for name in spoilt})
    for name, (auto, reported) in found.items():
        assert auto == f"checkpoint-{STEPS - 1}", name
        assert spoilt[name].name in reported, (name, reported)


def test_it_goes_on_from_the_one_before(checkpoint, finished, tmp_path):
    source, losses = finished
    folder = copy(source, tmp_path / "run")
    spoil(next((folder / f"checkpoint-{STEPS}" / "training" / "optimizer").glob("*.distcp")), flip)
    (folder / "checkpoint-99").mkdir()
    (resumed,) = run_ranks(1, go_on, checkpoint, folder)
    assert resumed["loss"] == losses
    assert "checkpoint-99 has no trainer_state.json; it is incomplete and ignored" in resumed["reported"][0]
    assert f"checkpoint-{STEPS} is damaged" in resumed["reported"][1]


def only_damaged(checkpoint: Path, output_dir: Path) -> str:
    from mca_config.errors import McaError

    try:
        go_on(checkpoint, output_dir)
    except McaError as error:
        return str(error)
    return "no error"


def test_a_run_does_not_restart_if_every_checkpoint_is_damaged(checkpoint, finished, tmp_path):
    source, _ = finished
    folder = copy(source, tmp_path / "run")
    for path in list(folder.glob("checkpoint-*")):
        if path.name == f"checkpoint-{STEPS}":
            spoil(next((path / "training" / "optimizer").glob("*.distcp")), truncate)
        else:
            shutil.rmtree(path)
    (message,) = run_ranks(1, only_damaged, checkpoint, folder)
    assert "bytes, the manifest says" in message


@pytest.mark.qualify
@pytest.mark.parametrize("name", SAVED)
def test_a_full_disk_leaves_the_checkpoints_before(name, whole, checkpoint, small_disk):
    from mca_train.checkpoint.output_files import checkpoints

    size, changes = SAVED[name]
    if size == 1:
        (small_disk / "other").write_bytes(bytes(1 << 20))  # all its checkpoints had room
    with pytest.raises(RanksFailed) as failed:
        run_ranks(size, go_on, checkpoint, small_disk, **changes)
    reported = "cannot be written, the disk is full; make room and resume"
    assert str(failed.value).partition("\n")[2].count(reported) == size, (
        "every rank ends by itself, within a second"
    )
    steps = [int(path.name.split("-")[1]) for path in checkpoints(small_disk)]
    assert steps
    assert steps == list(range(1, len(steps) + 1))
    assert not list(small_disk.glob("*.partial-*"))
    for step in steps[:-1]:
        shutil.rmtree(small_disk / f"checkpoint-{step}")
    for resumed in run_ranks(size, go_on, checkpoint, small_disk, save_total_limit=1, **changes):
        assert resumed["curve"] == whole(name)[0]["curve"]
