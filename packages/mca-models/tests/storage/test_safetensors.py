import threading
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mca_config.errors import McaError
from mca_models.storage import writer
from mca_models.storage.dtypes import ITEM_SIZES, dtype_code, numpy_dtype
from mca_models.storage.safetensors import plan_file, read_header
from mca_models.storage.writer import SafetensorsWriter

# three tensors, byte for byte: the format's definition, not this code's opinion of it
LITERAL = (
    b'\xa0\x00\x00\x00\x00\x00\x00\x00{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    b'"b":{"dtype":"U8","shape":[],"data_offsets":[8,9]},"c":{"dtype":"BF16","shape":[1,0],"data_offsets":[9,9]}}'
    b"            "
    b"\x00\x00\x80\x3f\x00\x00\x00\x40\x07"
)


def literal() -> bytes:
    body = LITERAL[8:].rpartition(b"}")
    header = body[0] + b"}" + b" " * 4
    return len(header).to_bytes(8, "little") + header + LITERAL[-9:]


def test_reads_literal_bytes(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(literal())
    tensors = read_header(file).tensors
    assert tensors["a"].array().tolist() == [1.0, 2.0]
    assert tensors["b"].array().shape == () and int(tensors["b"].read()) == 7
    assert tensors["c"].array().shape == (1, 0) == tensors["c"].read().shape


def test_reads_what_the_reference_writes(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    tensors = {
        f"t{i}": torch.randn(5, 3).to(dtype)
        for i, dtype in enumerate(
            [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64]
        )
    }
    save_file(tensors, file, {"format": "pt"})
    header = read_header(file)
    assert header.metadata == {"format": "pt"}
    for name, tensor in tensors.items():
        info = header.tensors[name]
        for array in (info.array(), info.read(), np.concatenate([info.read(0, 2), info.read(2, 5)])):
            assert array.tobytes() == tensor.view(torch.uint8).numpy().tobytes(), name


def test_the_reference_reads_what_is_written_in_any_order(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "x.safetensors"
    wide, narrow = np.arange(12, dtype=np.float32).reshape(3, 4), np.arange(5).astype(ml_dtypes.bfloat16)
    plan = plan_file(
        file, [("narrow", "BF16", (5,)), ("wide", "F32", (3, 4)), ("none", "F32", (0, 4))], {"a": "b"}
    )
    with SafetensorsWriter(plan) as writer:
        writer.write("wide", wide[2:], 32)
        writer.write("narrow", narrow)
        writer.write("wide", wide[:2].tobytes())
    read = load_file(file)
    assert torch.equal(read["wide"], torch.from_numpy(wide)) and read["none"].shape == (0, 4)
    assert read["narrow"].tolist() == [0, 1, 2, 3, 4]
    raw = file.read_bytes()
    assert (writer.record.nbytes, writer.record.crc32) == (len(raw), zlib.crc32(raw))
    assert all(info.offset % info.itemsize == 0 for info in plan.tensors.values())


def test_several_threads_fill_one_file(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 255, 1 << 20, dtype=np.uint8)
    plan = plan_file(tmp_path / "x.safetensors", [("x", "U8", data.shape)])
    with SafetensorsWriter(plan) as writer:
        step = 1 << 16
        threads = [
            threading.Thread(target=writer.write, args=("x", data[i : i + step], i))
            for i in range(0, data.size, step)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    raw = plan.file.read_bytes()
    assert raw[len(plan.header) :] == data.tobytes() and writer.record.crc32 == zlib.crc32(raw)


@pytest.mark.parametrize("writes", [[], [(0, 3)], [(0, 4), (2, 4)], [(0, 4), (0, 4)], [(4, 4)]])
def test_a_file_with_gaps_or_overlaps_is_refused(writes: list[tuple[int, int]], tmp_path: Path) -> None:
    plan = plan_file(tmp_path / "x.safetensors", [("x", "U8", (8,))])
    with pytest.raises(McaError, match="not written completely"), SafetensorsWriter(plan) as writer:
        for start, length in writes:
            writer.write("x", b"x" * length, start)


def test_writing_beyond_a_tensor_is_refused(tmp_path: Path) -> None:
    plan = plan_file(tmp_path / "x.safetensors", [("x", "U8", (8,)), ("y", "U8", (8,))])
    with pytest.raises(McaError, match="has 8 bytes"), SafetensorsWriter(plan) as writer:
        writer.write("x", b"x" * 9)


@pytest.mark.parametrize("length", [1, 4000, 4030, 4096, 9000])
def test_the_first_tensor_begins_on_a_page_and_no_page_is_empty(length: int, tmp_path: Path) -> None:
    plan = plan_file(tmp_path / "x.safetensors", [("x" * length, "U8", (8,))])
    assert len(plan.header) % 4096 == 0 and len(plan.header) == plan.tensors["x" * length].offset
    assert len(plan.header) - len(plan.header.rstrip(b" ")) < 4096


def test_one_name_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(McaError, match="written twice"):
        plan_file(tmp_path / "x", [("x", "U8", (8,)), ("x", "U8", (8,))])


@pytest.mark.parametrize("code", sorted(ITEM_SIZES))
def test_codes_and_array_types_agree(code: str) -> None:
    assert numpy_dtype(code).itemsize == ITEM_SIZES[code]
    assert dtype_code(numpy_dtype(code)) == code


@pytest.mark.parametrize("has_hint", [False, True])
def test_the_kernel_is_asked_to_write_what_has_grown(has_hint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The range of a hint is that of all bytes since the last one."""
    hints: list[tuple[int, ...]] = []
    monkeypatch.setattr(writer, "_WRITEBACK_BYTES", 100)
    monkeypatch.setattr(
        writer, "_sync_file_range", (lambda *given: hints.append(given)) if has_hint else None
    )
    each = writer.Writeback(5)
    for start, nbytes in ((500, 30), (300, 20), (540, 10), (600, 39), (400, 1), (50, 99), (900, 1), (0, 300)):
        each.add(start, nbytes)
    assert hints == ([(5, 300, 339, 2), (5, 50, 851, 2), (5, 0, 300, 2)] if has_hint else [])
