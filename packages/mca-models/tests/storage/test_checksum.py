import zlib
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from mca_models.storage.writer import crc32_join, file_crc32


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_joined_checksums_equal_the_checksum_of_the_whole(parts: list[bytes]) -> None:
    crc = 0
    for part in parts:
        crc = crc32_join(crc, zlib.crc32(part), len(part))
    assert crc == zlib.crc32(b"".join(parts))


def test_long_parts_join_too() -> None:
    one, two = bytes(range(256)) * 5000, b"\xff" * 1_234_567
    assert crc32_join(zlib.crc32(one), zlib.crc32(two), len(two)) == zlib.crc32(one + two)


def test_checksum_of_a_file(tmp_path: Path) -> None:
    data = bytes(range(256)) * 40_000
    (tmp_path / "file").write_bytes(data)
    assert file_crc32(tmp_path / "file") == zlib.crc32(data)
