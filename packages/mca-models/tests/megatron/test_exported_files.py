"""Files of an export as Hugging Face: written without sums that nothing reads."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mca_models.megatron.state.save import _open_files


def test_no_checksum_is_made_of_what_no_manifest_names(tmp_path: Path) -> None:
    layout: Any = SimpleNamespace(files={"a.safetensors": ["x"]}, specs=lambda name: [("x", "U8", (4,))])
    place: Any = SimpleNamespace(world_size=1, rank=0)
    with ExitStack() as files:
        writer = _open_files(place, layout, tmp_path, files)["x"]
        writer.write("x", b"abcd", 0)
    assert (tmp_path / "a.safetensors").read_bytes().endswith(b"abcd")
    assert writer.record.crc32 == 0
