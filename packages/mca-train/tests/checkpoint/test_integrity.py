"""The manifest of a checkpoint: files that it covers, which rank reads them, and what it finds wrong."""

import json
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mca_models.storage.manifest import FILE_NAME as MODEL_MANIFEST
from mca_train.checkpoint import integrity
from mca_train.checkpoint.integrity import ARGUMENTS_FILE, MANIFEST, Checksums, faults
from mca_train.checkpoint.output_files import HF_FOLDER

STATE = MANIFEST.parent.name
FILES = {
    f"{STATE}/rng_0.safetensors": b"first",
    f"{STATE}/rng_1.safetensors": b"second rank",
    f"{STATE}/optimizer/__1_0.distcp": b"x" * 5000,
    "trainer_state.json": b"{}",
    "iter_0000001/metadata.json": b"[]",
    f"{HF_FOLDER}/model.safetensors": b"exported",
    f"iter_0000002/{MODEL_MANIFEST}": b"{}",
    "iter_0000002/model.safetensors": b"covered by the model's manifest",
}
COVERED = sorted([*list(FILES)[:5], f"iter_0000002/{MODEL_MANIFEST}"])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    return tmp_path


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives of one rank, and no model with a manifest to read."""
    monkeypatch.setattr(integrity, "all_gather", lambda local: [local])
    monkeypatch.setattr(integrity, "run_on_first_rank", lambda call: call())
    monkeypatch.setattr(integrity, "run_on_all_ranks", lambda call: [call()])
    monkeypatch.setattr(integrity.groups, "barrier", lambda: None)
    monkeypatch.setattr(integrity.Manifest, "load", lambda folder: SimpleNamespace(files={}))


def test_a_manifest_covers_all_but_the_export_and_what_the_models_own_covers(checkpoint: Path) -> None:
    assert integrity._covered_files(checkpoint) == COVERED


@pytest.mark.parametrize(
    ("name", "rank"),
    [("training/rng_3.safetensors", 3), ("optimizer/__12_0.distcp", 12), ("trainer_state.json", 0)],
)
def test_the_rank_that_wrote_a_file_reads_it(name: str, rank: int) -> None:
    assert integrity._writer(name) == rank


def made(checkpoint: Path) -> Any:
    document = {
        "version": 1,
        "files": {
            name: {"bytes": len(FILES[name]), "crc32": f"{zlib.crc32(FILES[name]):08x}"} for name in COVERED
        },
    }
    (checkpoint / MANIFEST).write_text(json.dumps(document))
    return document


def test_each_fault_is_found_by_the_rank_that_reads_the_file(
    checkpoint: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(checkpoint)
    assert faults(checkpoint, 0, 1) == []
    monkeypatch.setattr(integrity, "_CHUNK", 7)
    assert faults(checkpoint, 0, 1) == [], "read in blocks"
    first, second, third = (checkpoint / name for name in COVERED[:3])
    first.write_bytes(b"[")
    second.write_bytes(FILES[COVERED[1]][:-1] + b"?")
    third.unlink()
    found = faults(checkpoint, 0, 1)
    assert found == [
        f"{first}: has 1 bytes, the manifest says {len(FILES[COVERED[0]])}",
        f"{second}: its checksum is wrong, the file is corrupt",
        f"{third}: cannot be read (No such file or directory)",
    ]
    assert [faults(checkpoint, rank, 3) for rank in range(3)] == [[each] for each in found]


@pytest.mark.parametrize(
    ("text", "words"), [("{", "cannot be read"), ('{"files": {"a": {"bytes": 1}}}', "cannot be read")]
)
def test_a_manifest_that_cannot_be_read_is_one_fault(
    text: str, words: str, checkpoint: Path, alone: None
) -> None:
    (checkpoint / MANIFEST).write_text(text)
    (fault,) = faults(checkpoint, 1, 2)
    assert fault.startswith(f"{checkpoint / MANIFEST}: ") and words in fault


def test_a_model_only_checkpoint_needs_no_training_state(tmp_path: Path, alone: None) -> None:
    (fault,) = faults(tmp_path, 0, 1)
    assert fault == f"{tmp_path / STATE}: is missing"
    for text, is_fault in (('{"save_only_model": true}', False), ('{"save_only_model": false}', True)):
        (tmp_path / ARGUMENTS_FILE).write_text(text)
        assert bool(faults(tmp_path, 0, 1)) == is_fault


def test_the_manifest_that_is_written_has_every_covered_file(
    checkpoint: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = made(checkpoint)
    (checkpoint / MANIFEST).unlink()
    ranks: Any = SimpleNamespace(rank=0, world_size=1, is_first=True)
    synced: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(integrity, "write_file", lambda path, data: path.write_bytes(data))
        patched.setattr(integrity.os, "fsync", synced.append)
        Checksums(checkpoint, ranks).finish()
    assert len(synced) == len(COVERED), "files are on the disk before the manifest says so"
    assert json.loads((checkpoint / MANIFEST).read_text()) == expected
    second: Any = SimpleNamespace(rank=1, world_size=2)
    sums = Checksums(checkpoint, second)
    sums._names = COVERED
    sums._sum()
    assert sorted(sums._records) == [name for name in COVERED if "rng_1" in name or "__1_0" in name]
    sums._names = ["training/rng_1.missing", "rng_1.safetensors"]
    sums._sum()
    with pytest.raises(OSError):
        sums._records_or_error()


def test_a_manifest_is_there_when_any_rank_goes_on(
    checkpoint: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks list files once all have written, and leave once the first one has written the manifest."""
    seen: list[tuple[bool, list[str]]] = []
    for is_first in (False, True):
        ranks: Any = SimpleNamespace(rank=0, world_size=1, is_first=is_first)
        sums = Checksums(checkpoint, ranks)
        monkeypatch.setattr(
            integrity.groups,
            "barrier",
            lambda sums=sums: seen.append(((checkpoint / MANIFEST).exists(), [*sums._names])),
        )
        sums.finish()
    assert seen == [(False, []), (False, COVERED), (False, []), (True, COVERED)]


def test_files_are_read_in_the_background_until_all_ranks_are_done(
    checkpoint: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(integrity.groups, "max_over_ranks", lambda own, device: asked.append(device) or own)
    ranks: Any = SimpleNamespace(rank=0, world_size=1, is_first=True, device="device")
    sums = Checksums(checkpoint, ranks)
    sums.done()
    assert sums._thread is not None
    sums._thread.join()
    assert sums.done() and asked == ["device"] * 2
    monkeypatch.setattr(integrity.groups, "max_over_ranks", lambda own, device: own + 1)
    assert not sums.done(), "another rank reads"
    sums.finish()
    assert (checkpoint / MANIFEST).exists()


def test_a_model_with_a_manifest_is_checked_where_it_is_not_covered_yet(
    checkpoint: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a training state, an iteration in Megatron's own format has nothing to compare with."""
    read: list[str] = []
    wrong = SimpleNamespace(nbytes=1, crc32=2)

    def load(folder: Path) -> Any:
        read.append(folder.name)
        return SimpleNamespace(files={"model.safetensors": wrong})

    monkeypatch.setattr(integrity.Manifest, "load", load)
    made(checkpoint)
    (fault,) = faults(checkpoint, 0, 1)
    assert read == ["iter_0000002"] and fault.startswith(
        f"{checkpoint}/iter_0000002/model.safetensors: has 31"
    )
    (checkpoint / MANIFEST).unlink()
    (checkpoint / MANIFEST.parent).rename(checkpoint / "other")
    (checkpoint / ARGUMENTS_FILE).write_text('{"save_only_model": true}')
    read.clear()
    assert len(faults(checkpoint, 0, 1)) == 1 and read == ["iter_0000002"]
