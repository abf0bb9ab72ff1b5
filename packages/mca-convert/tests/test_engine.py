"""Execution of fills on files made by hand: blocks of fp8, casts, progress, and values that are reported."""

import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from mca_config.errors import McaError
from mca_convert.engine import Engine
from mca_convert.fills import Fill
from mca_convert.pool import Limits
from mca_convert.reader import SourceFiles
from mca_models.quantization.fp8 import quantize
from mca_models.storage.byte_ranges import Gather, Move
from mca_models.storage.manifest import FileRecord
from mca_models.storage.safetensors import plan_file, read_header
from mca_models.storage.source import Part
from mca_models.storage.writer import SafetensorsWriter, file_crc32
from mca_models.weights import Param

PARAM = Param(mca="x", hf=("x",))
SHAPE = (300, 200)
VALUES = np.random.default_rng(3).standard_normal(SHAPE).astype(np.float32)


class Written:
    """Files that an engine writes of one fp32 matrix, and what it reports."""

    def __init__(self, folder: Path, values: Any = VALUES, *, memory: int = 1) -> None:
        save_file({"w": values}, folder / "in.safetensors")
        info = read_header(folder / "in.safetensors").tensors["w"]
        self.part, self.folder, self.memory = Part(info, info.shape), folder, memory
        self.noted: set[str] = set()
        self.nbytes = 0
        self.lock = threading.Lock()

    def fill(self, dtype: str, scales: str | None = None) -> Fill:
        size = int(np.prod(self.part.shape))
        gather = Gather(self.part.shape, (Move(0, 0, 0, size, 1, size, size),))
        return Fill(f"{dtype}.safetensors", "w", 0, gather, (self.part,), "F32", dtype, PARAM, scales)

    def run(self, *fills: Fill, checksum: bool = True) -> dict[str, FileRecord]:
        plans = {}
        for fill in fills:
            specs = [("w", fill.dtype, fill.gather.shape)]
            if fill.scales:
                specs.append((fill.scales, "F32", (3, 2)))
            plans[fill.file] = plan_file(self.folder / fill.file, specs)

        def progress(nbytes: int) -> None:
            with self.lock:
                self.nbytes += nbytes

        engine = Engine(
            plans,
            SourceFiles({}),
            Limits(workers=2, memory=self.memory),
            checksum=checksum,
            progress=progress,
            note=lambda fill: self.noted.add(fill.file),
        )
        return engine.run(fills)

    def read(self, dtype: str, name: str = "w") -> Any:
        return read_header(self.folder / f"{dtype}.safetensors").tensors[name].array()


@pytest.mark.parametrize("memory", [1, 1 << 30])
def test_rows_of_blocks_are_written_whole_with_their_scales(memory: int, tmp_path: Path) -> None:
    """A row of blocks is larger than the smallest buffer."""
    made = Written(tmp_path, memory=memory)
    records = made.run(made.fill("F8_E4M3", "s"), made.fill("BF16"), made.fill("F32"))
    values, scales = quantize("w", VALUES)
    assert made.read("F8_E4M3").tobytes() == values.tobytes()
    assert made.read("F8_E4M3", "s").tolist() == scales.tolist()
    assert made.read("BF16").tobytes() == VALUES.astype(ml_dtypes.bfloat16).tobytes()
    assert made.read("F32").tobytes() == VALUES.tobytes()
    assert made.nbytes == 60000 * (1 + 2 + 4) and made.noted == set()
    for name, record in records.items():
        file = tmp_path / name
        assert record == FileRecord(file.stat().st_size, file_crc32(file))


def test_a_file_has_no_checksum_unless_it_is_asked_for(tmp_path: Path) -> None:
    made = Written(tmp_path)
    (record,) = made.run(made.fill("F32"), checksum=False).values()
    assert record == FileRecord((tmp_path / "F32.safetensors").stat().st_size, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_tensors_with_values_that_are_not_finite_are_reported(value: float, tmp_path: Path) -> None:
    values = VALUES.copy()
    values[299, 199] = value
    made = Written(tmp_path, values)
    made.run(made.fill("F32"), made.fill("BF16"))
    assert made.noted == {"F32.safetensors", "BF16.safetensors"}
    assert np.array_equal(made.read("F32"), values, equal_nan=True)


def test_a_cast_that_overflows_is_reported_and_ends_the_work(tmp_path: Path) -> None:
    values = VALUES.copy()
    values[0, 0] = 1e6
    made = Written(tmp_path, values)
    with pytest.raises(McaError, match=r"^tensor w: 1e\+06 overflows fp16"):
        made.run(made.fill("F16"))
    assert made.noted == {"F16.safetensors"}


def test_a_file_is_closed_after_its_last_byte_and_not_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are complete need neither a descriptor nor memory for pages while others are written."""
    events: list[str] = []
    close = SafetensorsWriter.close

    def closing(writer: SafetensorsWriter) -> None:
        events.append("closed")
        close(writer)

    monkeypatch.setattr(SafetensorsWriter, "close", closing)
    made = Written(tmp_path)
    fills = [made.fill("F32"), made.fill("BF16")]
    plans = {each.file: plan_file(tmp_path / each.file, [("w", each.dtype, SHAPE)]) for each in fills}
    limits = Limits(workers=1, memory=1 << 30)
    Engine(plans, SourceFiles({}), limits, checksum=True, progress=lambda _: events.append("written")).run(
        fills
    )
    assert events[:4] == ["written", "closed", "written", "closed"]
