"""Files of ``torch.save``, read without torch: every view, every dtype, every way to be broken."""

import io
import itertools
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mca_config.errors import McaError
from mca_models.storage.lazy_tensor import Block, StridedTensor, assemble
from mca_models.torch_checkpoint.torch_file import open_torch_file, read_archive

DTYPES = [
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool",
]  # fmt: skip


def raw(tensor: torch.Tensor) -> bytes:
    return (
        tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        if tensor.dim()
        else raw(tensor[None])
    )


def save(tmp_path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, tmp_path / "saved.pt", **options)
    return tmp_path / "saved.pt"


def views(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    base = (torch.randn(12, 10) * 5).to(dtype)
    return {
        "whole": base,
        "rows": base[3:7],
        "columns": base[:, 2:5],
        "transposed": base.t(),
        "strided": base[::3, ::2],
        "cube": base.reshape(3, 4, 10)[1:, :2, 4:],
        "expanded": base[:1].expand(4, 10),
        "one": base[2, 3],
        "none": base[:0],
    }


@pytest.mark.parametrize("name", DTYPES)
def test_every_view_reads_bit_for_bit(tmp_path: Path, name: str) -> None:
    expected = views(getattr(torch, name))
    found = open_torch_file(save(tmp_path, expected)).state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        stored = found[key]
        assert stored.shape == tuple(tensor.shape)
        assert stored.read().tobytes() == raw(tensor), key
        assert np.asarray(stored.flat()[:]).tobytes() == raw(tensor), key
        info = stored.info()
        assert (info is not None) == (tensor.is_contiguous() or tensor.numel() == 0), key
        if info is not None:
            assert info.read().tobytes() == raw(tensor), key
    assert found["rows"].read(1, 3).tobytes() == raw(expected["rows"][1:3])
    assert found["cube"].entry(1).read().tobytes() == raw(expected["cube"][1])


def test_views_of_one_storage_point_into_it(tmp_path: Path) -> None:
    base = torch.arange(1000.0)
    found = open_torch_file(save(tmp_path, {"a": base[10:20], "b": base[15:30]})).state_dict()
    assert found["b"].offset - found["a"].offset == 20
    assert found["a"].nbytes == 40


def test_every_storage_begins_where_torch_put_it(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((i + 1,), float(i)) for i in range(200)}
    found = open_torch_file(save(tmp_path, tensors)).state_dict()
    assert all((found[name].read() == i).all() for i, name in enumerate(tensors))


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    steps=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    start=st.integers(0, 30),
    stop=st.integers(0, 30),
)
def test_any_slice_of_the_flat_view_is_that_of_torch(
    tmp_path_factory: Any, shape: list[int], steps: list[int], start: int, stop: int
) -> None:
    base = torch.randn([size * step for size, step in zip(shape, steps, strict=False)])
    view = base[tuple(slice(None, None, step) for _, step in zip(shape, steps, strict=False))]
    file = save(tmp_path_factory.mktemp("x"), {"v": view})
    tensor = open_torch_file(file).state_dict()["v"]
    assert (np.asarray(tensor.flat()[start:stop]) == view.reshape(-1)[start:stop].numpy()).all()


def test_an_archive_inside_a_file_is_read_from_its_offset(tmp_path: Path) -> None:
    blob = io.BytesIO()
    torch.save(torch.arange(7), blob)
    file = tmp_path / "many"
    file.write_bytes(b"x" * 13 + blob.getvalue() + b"PK\x05\x06 what follows")
    with file.open("rb") as stream:
        saved = read_archive(stream, file, 13, len(blob.getvalue()))
    assert saved.tensor(saved.tree, "t").read().tolist() == list(range(7))


def test_extra_state_is_passed_over_whatever_it_is(tmp_path: Path) -> None:
    value = {"model": {"a.weight": torch.ones(2), "a._extra_state": None, "b._extra_state": io.BytesIO(b"1")}}
    assert list(open_torch_file(save(tmp_path, value)).state_dict("model")) == ["a.weight"]


def test_a_file_of_torch_before_1_6_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(
        McaError, match=r"saved\.pt: torch before version 1\.6 wrote it; read it with torch\.load"
    ):
        open_torch_file(save(tmp_path, {"a": torch.ones(2)}, _use_new_zipfile_serialization=False))


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    source = zipfile.ZipFile(save(tmp_path, {"a": torch.ones(500)}))
    file = tmp_path / "packed.pt"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in source.namelist():
            packed.writestr(name, source.read(name))
    with pytest.raises(McaError, match=r"packed.pt: not a file of torch.save: .* is compressed"):
        open_torch_file(file)


def test_big_endian_numbers_are_refused(tmp_path: Path) -> None:
    source = zipfile.ZipFile(save(tmp_path, {"a": torch.ones(5)}))
    file = tmp_path / "big.pt"
    with zipfile.ZipFile(file, "w") as changed:
        for name in source.namelist():
            changed.writestr(name, b"big" if name.endswith("byteorder") else source.read(name))
    with pytest.raises(McaError, match="big-endian"):
        open_torch_file(file)


def test_an_archive_of_the_standard_library_is_read_too(tmp_path: Path) -> None:
    source = zipfile.ZipFile(save(tmp_path, {"a": torch.arange(5)}))
    file = tmp_path / "again.pt"
    with zipfile.ZipFile(file, "w") as again:
        for name in source.namelist():
            again.writestr(name, source.read(name))
        again.comment = b"a comment" * 700
    assert open_torch_file(file).state_dict()["a"].read().tolist() == list(range(5))


@pytest.mark.parametrize("content", [b"", b"PK", b"PK\x03\x04", b"{}", b"\x00" * 5000], ids=repr)
def test_what_is_no_archive_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(McaError, match=r"x.pt: not a file of torch.save"):
        open_torch_file(tmp_path / "x.pt")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(McaError, match=r"none.pt: cannot be read \(No such file"):
        open_torch_file(tmp_path / "none.pt")


def test_cut_anywhere_gives_an_error(tmp_path: Path) -> None:
    data = save(tmp_path, {"a": torch.ones(64)}).read_bytes()
    for size in range(0, len(data), 37):
        (tmp_path / "cut.pt").write_bytes(data[:size])
        with pytest.raises(McaError, match=r"cut.pt"):
            open_torch_file(tmp_path / "cut.pt").state_dict()


def test_flipped_bytes_never_read_outside_of_the_file(tmp_path: Path) -> None:
    data = bytearray(save(tmp_path, {"a": torch.ones(8)}).read_bytes())
    file = tmp_path / "flip.pt"
    generator = np.random.default_rng(0)
    for _ in range(400):
        changed = bytearray(data)
        for at in generator.integers(0, len(data), 2):
            changed[at] ^= 1 << int(generator.integers(0, 8))
        file.write_bytes(changed)
        try:
            tensors = open_torch_file(file).state_dict()
        except McaError:
            continue
        for tensor in tensors.values():
            assert tensor.offset + tensor.nbytes <= file.stat().st_size
            tensor.read()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1], "expected a dict of tensors by name"),
        ({1: torch.ones(1)}, "expected a dict of tensors by name"),
        ({"a": 3}, "tensor 'a' is no tensor but int"),
        ({"a": torch.ones(1, dtype=torch.complex64)}, "which no safetensors file can hold"),
    ],
)
def test_what_is_no_state_dict_is_refused(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(McaError, match=message):
        open_torch_file(save(tmp_path, value)).state_dict()


def block(shape: tuple[int, ...]) -> StridedTensor:
    strides = np.empty(shape, np.uint8).strides
    return StridedTensor("x", "U8", shape, strides, 0, Path("none"))


@pytest.mark.parametrize(
    ("chunks", "fault"),
    [
        ([((0, 0), (2, 4)), ((3, 0), (1, 4))], "leave a hole"),
        ([((0, 0), (3, 4)), ((2, 0), (2, 4))], "overlap"),
        ([((0, 0), (4, 3)), ((0, 2), (4, 1))], "overlap"),
        ([((0, 0), (4, 4)), ((0, 0), (4, 4))], "overlap"),
        ([((0, 0), (4, 5))], "reach outside"),
        ([], "leave a hole"),
        ([((0, 0), (2, 2)), ((2, 2), (2, 2)), ((0, 2), (2, 2)), ((1, 0), (2, 2))], "overlap"),
    ],
)
def test_chunks_must_fill_the_shape_exactly(chunks: Any, fault: str) -> None:
    with pytest.raises(McaError, match=f"the chunks of w {fault}"):
        assemble("w", "U8", (4, 4), [Block(at, block(shape)) for at, shape in chunks], "ckpt")


def test_a_grid_of_chunks_reads_as_the_whole(tmp_path: Path) -> None:
    whole = torch.randn(6, 9)
    rows, columns = [0, 2, 6], [0, 4, 5, 9]
    pieces = {
        (r0, c0): whole[r0:r1, c0:c1].clone()
        for r0, r1 in itertools.pairwise(rows)
        for c0, c1 in itertools.pairwise(columns)
    }
    file = save(tmp_path, {f"{r}.{c}": piece for (r, c), piece in pieces.items()})
    found = open_torch_file(file).state_dict()
    chunks = [Block(at, found[f"{at[0]}.{at[1]}"]) for at in pieces]
    tensor = assemble("w", "F32", (6, 9), chunks[::-1], "ckpt")
    assert (tensor.read() == whole.numpy()).all()
    assert (tensor.read(1, 3) == whole[1:3].numpy()).all()
    assert (tensor.flat()[11:37] == whole.reshape(-1)[11:37].numpy()).all()
