"""Ranks that save together: replicas share the writing; what fails on one rank fails on all and leaves nothing."""

import errno
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed

from harness import run_ranks
from layouts import arguments, world_size
from mca_config.errors import McaError
from mca_convert.cli import main as convert
from reference import make_reference

pytestmark = pytest.mark.ranks

FULL = "No space left on device"


@contextmanager
def _failing(owner: Any, name: str, error: Exception, rank: int) -> Iterator[None]:
    """A call that fails on one rank."""
    original = getattr(owner, name)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    if torch.distributed.get_rank() == rank:
        setattr(owner, name, fail)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _small_files(nbytes: int, rank: int) -> Iterator[None]:
    """The kernel itself refuses to let a file of one rank, or of processes that it forks, grow."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    sys.dont_write_bytecode = True  # Python takes a cut module of its cache for a whole one
    if torch.distributed.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _error(save: Callable[[], Any]) -> str:
    started = time.monotonic()
    with pytest.raises(McaError) as error:
        save()
    assert time.monotonic() - started < 20
    return str(error.value)


def fail_in_every_way(path: Path, target: Path) -> dict[str, str]:
    """Return the error of each failed save. Runs on every rank."""
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import common, filesystem_async

    from mca_models.megatron import AutoModel
    from mca_models.megatron.distributed import writer
    from mca_models.megatron.state import save
    from mca_models.storage.writer import SafetensorsWriter

    model = AutoModel.from_pretrained(path, arguments("tp2"))
    full = OSError(errno.ENOSPC, FULL)

    def hf() -> None:
        model.save_pretrained_as_hf(target, max_shard_bytes=9000)

    def megatron() -> None:
        model.save_pretrained(target, ckpt_format="torch_dist")

    def background() -> None:
        pending: Any = model.save_pretrained(target, ckpt_format="torch_dist", async_save=True)
        pending.finish()

    found = {}
    for rank, name in ((0, "close"), (1, "write")):
        with _failing(SafetensorsWriter, name, full, rank):
            found[f"{rank} mca {name}"] = _error(lambda: model.save_pretrained(target))
            found[f"{rank} hf {name}"] = _error(hf)
        with _small_files(4096, rank):
            found[f"{rank} mca limit"] = _error(lambda: model.save_pretrained(target))
            found[f"{rank} hf limit"] = _error(hf)
            found[f"{rank} torch_dist limit"] = _error(megatron)
            found[f"{rank} background limit"] = _error(background)
    with _failing(save, "make_file", full, 1):
        found["1 mca open"] = _error(lambda: model.save_pretrained(target))
    with _failing(filesystem_async, "_write_item", full, 1):
        found["1 torch_dist write"] = _error(megatron)
        found["1 background write"] = _error(background)
    alone = [(filesystem_async.FileSystemWriterAsync, "finish"), (writer, "_write_format")]
    owners: tuple[Any, ...] = (getattr(common, "TorchCommonSaveStrategy", None), serialization)
    alone += [(owner, "save_common") for owner in owners if hasattr(owner, "save_common")]
    for owner, name in alone:
        with _failing(owner, name, full, 0):
            found[f"0 torch_dist {name}"] = _error(megatron)
            found[f"0 background {name}"] = _error(background)
    with _failing(writer, "_run", full, 1):
        found["1 torch_dist run"] = _error(megatron)
    model.save_pretrained(target)  # and none of it stands in the way of a save that works
    return found


def test_all_ranks_fail_together(tmp_path: Path) -> None:
    source = make_reference("llama", tmp_path / "hf").path
    folder = tmp_path / "out"
    folder.mkdir()
    first, second = run_ranks(2, fail_in_every_way, source, folder / "saved")
    assert first == second
    for case, message in first.items():
        assert message.startswith(f"rank {case[0]} could not save: "), (case, message)
        assert FULL in message or "limit" in case, (case, message)
        assert ".partial-" not in message, (case, message)
        assert "\n" not in message
    assert [path.name for path in folder.iterdir()] == ["saved"]


def _slow(write: Callable[..., None], *args: Any, **options: Any) -> None:
    """Writes late: who kills it soon kills it before it has written."""
    time.sleep(60)
    write(*args, **options)


def killed_writer(path: Path, target: Path) -> str:
    """The background process of one rank dies. Runs on every rank."""
    import signal

    from mca_models.megatron import AutoModel
    from mca_models.megatron.distributed import writer

    model = AutoModel.from_pretrained(path, arguments("tp2"))
    with mock.patch.object(
        writer,
        "_write_with_reason",
        _slow if torch.distributed.get_rank() == 1 else writer._write_with_reason,
    ):
        pending: Any = model.save_pretrained(target, ckpt_format="torch_dist", async_save=True)
    if torch.distributed.get_rank() == 1:
        os.kill(pending._writing._process.pid, signal.SIGKILL)
    message = _error(pending.finish)
    assert _error(pending.finish) == message
    return message


def test_a_background_writer_that_dies_is_told(tmp_path: Path) -> None:
    source = make_reference("llama", tmp_path / "hf").path
    for message in run_ranks(2, killed_writer, source, tmp_path / "out" / "saved"):
        assert (
            message == "rank 1 could not save: the process that wrote the checkpoint was killed by signal 9"
        )
    assert not (tmp_path / "out").exists(), "nor its parent, which was made for it"


def refused(path: Path, target: Path) -> list[str]:
    from mca_models.megatron import AutoModel

    model: Any = AutoModel.from_pretrained(path)
    return [
        _error(lambda: model.save_pretrained(target, async_save=True)),
        _error(lambda: model.save_pretrained(target, ckpt_format="zarr")),
        _error(lambda: model.save_pretrained(path, ckpt_format="torch_dist")),
    ]


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    path = make_reference("llama", tmp_path).path
    for messages in run_ranks(2, refused, path, tmp_path / "out"):
        assert messages == [
            "async_save writes torch_dist checkpoints only; add ckpt_format='torch_dist'",
            "ckpt_format 'zarr' is none of mca, torch_dist",
            f"{path}: exists and is not empty; remove it or name another directory",
        ]


def share(pairs: list[tuple[Path, str]], folder: Path) -> list[tuple[int, int]]:
    """Bytes that this rank writes of each model's checkpoint and export. Runs on every rank."""
    from mca_models.megatron import AutoModel
    from mca_models.storage.writer import SafetensorsWriter

    counts: list[int] = []
    original = SafetensorsWriter.write

    def counting(self: Any, name: str, data: Any, start: int = 0) -> None:
        counts[-1] += len(data)
        original(self, name, data, start)

    SafetensorsWriter.write = counting
    for path, layout in pairs:
        models = AutoModel.from_pretrained(path, arguments(layout))
        counts.append(0)
        models.save_pretrained(folder / layout)
        counts.append(0)
        models.save_pretrained_as_hf(folder / f"{layout}-hf", max_shard_bytes=20_000)
    return list(zip(counts[::2], counts[1::2], strict=True))


SHARED = {
    "tp2dp2": ("llama", ["--tensor_model_parallel_size=2"]),
    "dp4": ("qwen3-tied", []),
    "cp2tp2": ("qwen2", ["--tensor_model_parallel_size=2", "--context_parallel_size=2"]),
    "ep2dp4": ("qwen3_moe", ["--expert_model_parallel_size=2"]),
    "tp2ep2etp1dp2": (
        "qwen2_moe",
        [
            "--tensor_model_parallel_size=2",
            "--expert_model_parallel_size=2",
            "--expert_tensor_parallel_size=1",
        ],
    ),
}


def _tree(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_replicas_share_the_writing(tmp_path: Path, every_case: bool) -> None:
    shared = {name: SHARED[name] for name in (SHARED if every_case else ("dp4", "cp2tp2", "tp2ep2etp1dp2"))}
    pairs = [
        (make_reference(case, tmp_path / "hf", "bfloat16").path, layout)
        for layout, (case, _) in shared.items()
    ]
    assert {world_size(layout) for layout in shared} == {4}
    counts = run_ranks(4, share, pairs, tmp_path / "saved")
    for number, (layout, (case, flags)) in enumerate(shared.items()):
        written = [own[number][0] for own in counts]
        assert min(own[number][1] for own in counts) > 0, "every rank writes a shard of an export"
        whole = sum(written)
        stored = sum(f.stat().st_size for f in (tmp_path / "saved" / layout).rglob("*.safetensors"))
        assert 0.8 * stored < whole < stored, "every byte is written once; the rest are headers"
        assert min(written) > 0.8 * whole / 4, (layout, written)
        source, converted = tmp_path / "hf" / f"{case}-bfloat16", tmp_path / "converted" / layout
        assert convert([f"--checkpoint_path={source}", f"--output_path={converted}", *flags]) == 0
        ours, theirs = _tree(tmp_path / "saved" / layout), _tree(converted)
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if ours[name] != theirs[name]] == []
