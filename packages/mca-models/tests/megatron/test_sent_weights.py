"""Errors of a receiver of weights, and the bytes that each replica writes of a file."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mca_config.errors import McaError
from mca_models.megatron.state import fingerprint, sender
from mca_models.megatron.state.save import _Share
from mca_models.megatron.state.sender import TensorRecord, WeightManifest, tensor_crc32
from mca_models.storage.safetensors import plan_file
from mca_models.storage.writer import make_file

FULL, FIRST, SECOND = torch.arange(6.0).view(2, 3), torch.ones(1, 2), torch.zeros(1, 2)
SENT = WeightManifest(
    3,
    2,
    (
        TensorRecord("a", "F32", (2, 3), None, tensor_crc32(FULL)),
        TensorRecord("experts", "F32", (1, 2), 0),
        TensorRecord("experts", "F32", (1, 2), 4),
    ),
)
RECEIVED: list[Any] = [("a", FULL), ("experts", SECOND, 4), ("experts", FIRST, 0)]


def test_a_receiver_with_all_tensors_of_its_version_has_no_problem() -> None:
    SENT.check(RECEIVED, version=2)
    assert WeightManifest.from_json(SENT.to_json()) == SENT
    replace(SENT, base_version=None).check(RECEIVED)
    assert tensor_crc32(FULL.T.contiguous().T) == tensor_crc32(FULL) != tensor_crc32(FULL.T)


@pytest.mark.parametrize(
    ("received", "words"),
    [
        (RECEIVED[:2], "experts from expert 0 on is missing"),
        (RECEIVED[1:], "a is missing"),
        ([*RECEIVED, RECEIVED[0]], "a is not in the manifest, or came twice"),
        ([*RECEIVED, ("experts", FIRST, 5)], "experts from expert 5 on is not in the manifest"),
        ([("a", FULL.T), *RECEIVED[1:]], r"a has shape \[3, 2\], expected \[2, 3\]"),
        ([("a", FULL + 1), *RECEIVED[1:]], "a has other bytes than were sent"),
        ([("a", FULL.view(torch.int32)), *RECEIVED[1:]], "a has dtype torch.int32, expected F32"),
    ],
)
def test_a_wrong_tensor_is_named(received: list[Any], words: str) -> None:
    with pytest.raises(McaError, match=f"^weights of version 3: {words}"):
        SENT.check(received, version=2)


@pytest.mark.parametrize("version", [None, 1, 3])
def test_changes_need_the_version_that_they_change(version: int | None) -> None:
    with pytest.raises(
        McaError, match=rf"version 3 are changes to version 2, the receiver has {version}; send"
    ):
        SENT.check(RECEIVED, version=version)


@pytest.mark.parametrize(("count", "shown"), [(8, 8), (9, 8)])
def test_eight_problems_are_shown(count: int, shown: int) -> None:
    with pytest.raises(McaError) as error:
        WeightManifest(1, None, ()).check((f"t{number}", FULL) for number in range(count))
    assert str(error.value).count("not in the manifest") == shown
    assert ("and 1 more" in str(error.value)) == (count > shown)


def test_a_parameter_has_changed_if_any_number_of_its_digest_has(monkeypatch: pytest.MonkeyPatch) -> None:
    others = torch.zeros(3, dtype=torch.int32)

    def reduce(flags: torch.Tensor, operation: Any) -> None:
        assert operation == torch.distributed.ReduceOp.MAX
        flags.copy_(torch.maximum(flags, others))

    monkeypatch.setattr(torch.distributed, "all_reduce", reduce)
    params: Any = [SimpleNamespace(mca_name=lambda name=name: name) for name in "abc"]
    before = torch.tensor([[1, 2], [3, 4], [5, 6]])
    now = torch.tensor([[1, 2], [3, 0], [0, 6]])
    assert sender._changed(params, before, now) == {"b", "c"}
    assert sender._changed(params, before, before) == set()
    others[0] = 1  # on another rank
    assert sender._changed(params, before, before) == {"a"}
    assert sender._changed(params, None, now) == {"a", "b", "c"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
def test_digests_and_fingerprints_do_not_depend_on_blocks(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.arange(10).to(dtype)
    whole, total = sender._digest(tensor), fingerprint._sum(tensor)
    monkeypatch.setattr(sender, "_STEP", 3)
    monkeypatch.setattr(fingerprint, "_STEP", 3)
    assert torch.equal(sender._digest(tensor), whole)
    assert torch.equal(fingerprint._sum(tensor), total)
    assert not torch.equal(sender._digest(tensor.flip(0)), whole), "the order counts"
    assert torch.equal(fingerprint._sum(tensor.flip(0)), total), "the order does not count"
    assert int(fingerprint._sum(torch.zeros(3, dtype=dtype))) == 0


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_replicas_write_all_bytes_of_a_file_once(count: int, tmp_path: Path) -> None:
    live = {
        "a": torch.arange(1, 6, dtype=torch.float32),
        "b": torch.arange(1, 8, dtype=torch.float64).view(7, 1),
        "c": torch.arange(1, 4, dtype=torch.bfloat16),
        "empty": torch.zeros(0),
    }
    codes = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16"}
    specs = [(name, codes[each.dtype], tuple(each.shape)) for name, each in live.items()]
    plan = plan_file(tmp_path / "model.safetensors", specs)
    make_file(plan)
    sizes = []
    for number in range(count):
        before = plan.file.read_bytes()
        _Share("model.safetensors", plan, number, count).write(live.get)
        sizes.append(sum(a != b for a, b in zip(before, plan.file.read_bytes(), strict=True)))
    found = load_file(plan.file)
    assert all(torch.equal(found[name], tensor) for name, tensor in live.items())
    assert all(size > 0 for size in sizes), "each replica writes"


def test_digests_of_all_shards_keep_every_bit() -> None:
    """Parameters without a shard on this rank have zeros; others are cast to the dtype in which they are sent."""
    shards = {"a": torch.arange(7.0), "c": torch.ones(3)}
    params: Any = [SimpleNamespace(mca_name=lambda name=name: name) for name in "abc"]
    specs = {"a": ("F32", (7,)), "b": ("F32", (7,)), "c": ("BF16", (3,))}
    found = sender._digests(params, specs, shards.get)
    assert found.dtype == torch.int64
    expected = [
        sender._digest(shards["a"]),
        torch.zeros(2, dtype=torch.int64),
        sender._digest(shards["c"].bfloat16()),
    ]
    assert torch.equal(found, torch.stack(expected)) and found.abs().max() > 2**54
