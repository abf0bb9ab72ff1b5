"""Files and buckets of an export as Hugging Face: no sums that nothing reads, no bucket beyond its limit."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from mca_models.megatron.state.export import packed_buckets
from mca_models.megatron.state.save import _open_files


def test_no_checksum_is_made_of_what_no_manifest_names(tmp_path: Path) -> None:
    layout: Any = SimpleNamespace(files={"a.safetensors": ["x"]}, specs=lambda name: [("x", "U8", (4,))])
    place: Any = SimpleNamespace(world_size=1, rank=0)
    with ExitStack() as files:
        writer = _open_files(place, layout, tmp_path, files)["x"]
        writer.write("x", b"abcd", 0)
    assert (tmp_path / "a.safetensors").read_bytes().endswith(b"abcd")
    assert writer.record.crc32 == 0


def test_a_bucket_has_the_tensors_that_its_limit_allows() -> None:
    tensors = [(str(size), torch.zeros(size, dtype=torch.uint8)) for size in (512, 512, 256, 512, 2048, 256)]
    found = [[entry.name for entry in bucket.entries] for bucket in packed_buckets(tensors, 1024)]
    assert found == [["512", "512"], ["256", "512"], ["2048"], ["256"]]
