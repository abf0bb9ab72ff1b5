"""Source files, threads and limits of a conversion, without a checkpoint."""

import os
import resource
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mca_config.errors import McaError
from mca_convert import pool, reader
from mca_convert.pool import ByteCounter, Limits, require_count, run_all, too_many_files
from mca_convert.reader import Buffers, Collector, ComputedParts, SourceFile, SourceFiles, split_bands
from mca_models.storage.byte_ranges import Move
from mca_models.storage.safetensors import TensorInfo
from mca_models.storage.source import Part

DATA = bytes(range(200))
CRC = zlib.crc32(DATA)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (made := tmp_path / "file").write_bytes(DATA)
    return made


def read(file: SourceFile, offset: int, nbytes: int) -> bytes:
    file.read_into(buffer := np.zeros(nbytes, np.uint8), offset)
    return buffer.tobytes()


def test_bytes_are_read_up_to_the_last_one(path: Path) -> None:
    file = SourceFile(path)
    for offset, nbytes in ((0, 200), (3, 5), (199, 1)):
        assert read(file, offset, nbytes) == DATA[offset : offset + nbytes]
        assert file.mapped(offset, nbytes).tobytes() == DATA[offset : offset + nbytes]
    for take in (file.mapped, lambda *where: read(file, *where)):
        with pytest.raises(McaError, match=f"^{path}: ended at byte 200 while it was read; was it changed?"):
            take(197, 4)
    file.close()


@pytest.mark.parametrize("left", [0, 100])
def test_a_file_that_became_shorter_is_named_with_its_new_end(path: Path, left: int) -> None:
    file = SourceFile(path)
    os.truncate(path, left)
    with pytest.raises(McaError, match=f"^{path}: ended at byte {left} while"):
        file.mapped(0, 200)
    with pytest.raises(McaError, match=f"^{path}: ended at byte {left} while"):
        read(file, 0, 200)


def test_a_file_without_bytes_has_none_to_map(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(McaError, match="ended at byte 0 while"):
        SourceFile(tmp_path / "empty").mapped(0, 1)


@pytest.mark.parametrize("at_once", [7, 1000])
@pytest.mark.parametrize(
    "parts",
    [
        [],
        [(0, 200)],
        [(0, 80), (80, 120)],
        [(120, 80), (10, 30)],
        [(0, 80), (60, 20), (100, 100)],
        [(0, 50), (0, 50)],
    ],
)
def test_the_checksum_is_of_all_bytes_in_order(
    parts: list[tuple[int, int]], at_once: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts may leave gaps, lie in any order, or be read twice."""
    monkeypatch.setattr(reader, "_AT_ONCE", at_once)
    right, wrong = SourceFile(path, CRC), SourceFile(path, CRC - 1)
    for part in parts:
        for file in (right, wrong):
            read(file, *part)
    right.check()
    with pytest.raises(
        McaError, match=f"its checksum is {CRC:08x}, the manifest says {CRC - 1:08x}; the file is damaged"
    ):
        wrong.check()


def test_only_bytes_that_were_not_read_are_read_for_the_checksum(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, asked = SourceFile(path, CRC), list[tuple[int, int]]()
    for part in ((150, 50), (20, 100)):
        read(file, *part)
    pread = os.pread
    monkeypatch.setattr(
        os, "pread", lambda fd, count, offset: asked.append((offset, count)) or pread(fd, count, offset)
    )
    monkeypatch.setattr(reader, "file_crc32", None)
    file.check()
    assert asked == [(0, 20), (120, 30)]
    SourceFile(path).check()
    assert len(asked) == 2, "a file without a checksum is not read"


def test_files_are_opened_once_and_checked_if_they_have_a_checksum(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(DATA)
    files = SourceFiles({tmp_path / "a": CRC, tmp_path / "b": CRC + 1})
    assert files.get(tmp_path / "c") is files.get(tmp_path / "c")
    assert [files.get(tmp_path / name).crc32 for name in "abc"] == [CRC, CRC + 1, None]
    calls: list[int] = []
    with pytest.raises(McaError, match="b: its checksum is"):
        files.check(1, lambda: calls.append(1))
    assert len(calls) == 2
    files.close()


@pytest.mark.parametrize(
    ("move", "reads"),
    [
        (Move(0, 2, 1, 6, 1, 6, 6), [(16 + (5 + 2) * 2, 12)]),
        (Move(0, 2, 1, 2, 3, 2, 4), [(16 + (5 + 2) * 2, 12)]),
        (Move(0, 2, 1, 2, 3, 5, 2), []),
        (Move(0, 2, 1, 3, 2, 1, 3, 4, 1), []),
    ],
)
def test_a_move_is_one_read_unless_the_source_has_gaps(
    move: Move, reads: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensor begins at byte 16 of its file, and the part at element 5 of the tensor."""
    values = np.arange(40, dtype=np.float16)
    (path := tmp_path / "file").write_bytes(bytes(16) + values.tobytes())
    asked: list[tuple[int, int]] = []
    read_into = SourceFile.read_into
    monkeypatch.setattr(
        SourceFile,
        "read_into",
        lambda file, buffer, offset: asked.append((offset, buffer.nbytes)) or read_into(file, buffer, offset),
    )
    info = TensorInfo("w", "F16", (40,), 16, 80, path)
    collector = Collector(SourceFiles({}), Buffers(64))
    chunk: Any = SimpleNamespace(start=100, stop=116, moves=[move], zeros=[(13, 16)])
    part = Part(info, (35,), 5)
    collector._buffers.array("out", "F16", 16)[:] = -1
    found = collector.collect(chunk, (part,), "F16", "out")
    expected = np.full(16, -1, np.float16)
    expected[13:] = 0
    for k in range(move.repeat):
        for i in range(move.run):
            source = move.source + k * move.source_stride + i * move.source_step
            expected[move.target + k * move.target_stride + i * move.target_step] = values[5 + source]
    assert found.tolist() == expected.tolist()
    assert asked == reads


def test_a_buffer_has_one_memory_for_every_dtype() -> None:
    buffers = Buffers(64)
    wide, narrow = buffers.array("out", "F32", 16), buffers.array("out", "F16", 3)
    assert (wide.size, narrow.size) == (16, 3)
    narrow[:] = 1
    assert wide.view(np.float16)[:3].tolist() == [1, 1, 1]
    assert not np.shares_memory(wide, buffers.array("cast", "F32", 16))


@pytest.mark.parametrize(("limit", "computes"), [(24, 1), (23, 3)])
def test_a_small_computed_part_is_computed_once(
    limit: int, computes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger one is computed again, in bands, for each chunk."""
    monkeypatch.setattr(reader, "_BAND", 4)
    values, computed = np.arange(6, dtype=np.float32) + 10, list[object]()

    class Elements:
        def __getitem__(self, where: slice) -> Any:
            computed.append(where)
            return values[where]

    part: Any = SimpleNamespace(
        info=SimpleNamespace(itemsize=4),
        shape=(6,),
        start=0,
        flat=lambda: computed.append("all") or values,
        elements=Elements,
    )
    parts = ComputedParts(limit)
    for number in range(3):
        parts.copy(part, Move(0, number, 0, 2, 2, 2, 2), out := np.zeros(4, np.float32))
        assert out.tolist() == values[number : number + 4].tolist()
    assert len(computed) == computes
    parts.keep((part,))
    assert bool(parts._kept) == (limit == 24)
    parts.keep(())
    assert not parts._kept


@pytest.mark.parametrize(
    ("elements", "bands"), [(1, [1, 1, 1, 1, 1]), (9, [1] * 5), (10, [2, 2, 1]), (25, [5]), (100, [5])]
)
def test_a_move_is_cut_into_bands_of_whole_runs(elements: int, bands: list[int]) -> None:
    move = Move(1, 3, 4, 2, 5, 5, 7)
    parts = list(split_bands(move, elements))
    assert [part.repeat for part in parts] == bands
    starts = [(part.source, part.target) for part in parts]
    before = [sum(bands[:number]) for number in range(len(bands))]
    assert starts == [(3 + 5 * runs, 4 + 7 * runs) for runs in before]
    assert [part.repeat for part in split_bands(move._replace(source_stride=0), 1)] == [1] * 5


def test_memory_is_shared_by_the_threads() -> None:
    assert (Limits(workers=3).buffer_bytes, Limits(workers=5).computed_bytes) == (1 << 20, (320 << 20) // 10)
    assert Limits(workers=5, memory=1000).computed_bytes == 100
    assert Limits(workers=2, memory=6 * 100_000).buffer_bytes == 24 * 4096


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
def test_a_count_is_a_whole_number_from_1(value: Any) -> None:
    require_count("workers", 1)
    with pytest.raises(McaError, match=f"^workers: expected a whole number of at least 1, not {value!r}$"):
        require_count("workers", value)


@pytest.mark.parametrize(("processors", "workers"), [(1, 1), (5, 5), (8, 8), (9, 8)])
def test_there_is_a_thread_for_each_processor_up_to_8(
    processors: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    assert pool.default_workers() == workers


def test_bytes_are_counted_and_reported() -> None:
    reports: list[tuple[int, int]] = []
    counter = ByteCounter(10, lambda *both: reports.append(both))
    for nbytes in (3, 4):
        counter.add(nbytes)
    counter.check()
    assert reports == [(3, 10), (7, 10), (7, 10)]
    ByteCounter(10, None).add(1)


def test_the_first_failure_ends_the_work_and_is_raised() -> None:
    done: list[int] = []

    def work(item: int) -> None:
        if item == 2:
            raise ValueError(item)
        done.append(item)

    run_all(range(2), 2, lambda: work)
    assert sorted(done) == [0, 1]
    with pytest.raises(ValueError, match="2"):
        run_all(range(9), 1, lambda: work)
    assert sorted(done) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("count", "hard", "fails"),
    [(100, 116, False), (101, 116, True), (10**6, resource.RLIM_INFINITY, False)],
)
def test_sixteen_files_stay_free(count: int, hard: int, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10, hard))
    raised: list[Any] = []
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: raised.append((which, limits)))
    message = too_many_files(count)
    assert (message is not None) == fails
    if message is None:
        pool.allow_open_files(count)
    else:
        assert message.startswith("101 files must be open at once, the system allows 116; raise its limit")
        with pytest.raises(McaError, match="101 files"):
            pool.allow_open_files(count)
    assert raised == [(resource.RLIMIT_NOFILE, (hard, hard))]
