"""Weight sender: slices of experts, sends of changed weights only, and manifests that a receiver checks."""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import tiny_hf
import torch

from harness import run_ranks
from layouts import arguments
from mca_config.errors import McaError
from mca_models.megatron.state import sender as sender_module
from mca_models.megatron.state.sender import WeightManifest
from weight_streams import SMALL

pytestmark = pytest.mark.ranks

EXPERTS = "mlp.experts."


def joined(received: list[Any]) -> dict[str, torch.Tensor]:
    """Return the full tensors of a stream with slices of experts."""
    slices: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor, *start in received:
        slices.setdefault(name, {})[start[0] if start else 0] = tensor
    return {name: torch.cat([parts[first] for first in sorted(parts)]) for name, parts in slices.items()}


def updates(path: Path, layout: str) -> None:
    """Run a sender through changes, an interruption and a restart. Runs on every rank."""
    from mca_models.megatron import AutoModel

    models = AutoModel.from_pretrained(path, arguments(layout))
    plain = dict(models.export_weights())
    slices = [
        weight
        for b in models.export_buckets(bucket_bytes=SMALL, split_experts=True)
        for weight in b.tensors()
    ]
    assert {name for name, *_ in slices if EXPERTS in name} == {w[0] for w in slices if len(w) == 3}
    assert len(slices) > len(plain) + 4
    assert plain.keys() == joined(slices).keys()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in joined(slices).items())
    models.load_weights(slices)
    assert all(torch.equal(tensor, plain[name]) for name, tensor in models.export_weights())

    sender = models.weight_sender(bucket_bytes=SMALL, split_experts=True, checksums=True)
    received: list[Any] = []

    def send(**options: bool) -> set[tuple[str, int | None]]:
        received[:] = [
            (n, t.clone(), *first) for b in sender.buckets(**options) for n, t, *first in b.tensors()
        ]
        return {(name, start[0] if start else None) for name, _, *start in received}

    everything = send()
    assert joined(received).keys() == plain.keys()
    assert sender.version == 1
    _require_manifest(sender.manifest, received, 1, None)
    assert send() == set()
    _require_manifest(sender.manifest, received, 2, 1)
    _change(models, "decoder.layers.1.mlp.experts.linear_fc1.weight2", first_and_last=True)
    assert send() == {(f"model.layers.1.{EXPERTS}gate_up_proj", 2)}, "values that only changed places count"
    if torch.distributed.get_rank() == 0:
        _change(models, "embedding.word_embeddings.weight")
    assert send() == {("model.embed_tokens.weight", None)}, "a change on one rank is enough"
    _require_manifest(sender.manifest, received, 4, 3)
    _change(models, "decoder.layers.0.self_attention.linear_proj.weight")
    next(stream := sender.buckets())
    stream.close()
    assert send() == everything, "after an interrupted send nothing is known about the receiver"
    assert send(full=True) == everything
    assert sender.version == 6
    _change(models, "decoder.final_layernorm.weight")
    stream = sender.buckets()
    bucket = next(stream, None)
    if torch.distributed.get_rank() == 0:
        stream.close()
    assert bucket is not None
    assert next(stream, None) is None
    assert send() == everything, "the only bucket is also the last, at which one rank stopped"
    assert sender.version == 8


def _change(models: Any, name: str, *, first_and_last: bool = False) -> None:
    """Change the shard of parameter ``name``, if this rank has it."""
    tensor = dict(models.canonical_parameters()).get(name)
    if tensor is None:
        return
    flat = tensor.data.view(-1)
    flat[0], flat[-1] = (flat[-1].clone(), flat[0].clone()) if first_and_last else (flat[0] + 1, flat[-1])


def _require_manifest(
    manifest: WeightManifest | None, received: list[Any], version: int, base: int | None
) -> None:
    assert manifest is not None
    assert (manifest.version, manifest.base_version) == (version, base)
    manifest = WeightManifest.from_json(manifest.to_json())
    manifest.check(received, version=base)
    if not received or torch.distributed.get_rank():
        return  # all ranks have received the same
    (name, tensor, *start), *rest = received
    wrong = tensor.clone()
    wrong.view(-1)[0] += 1
    shown = name if not start else f"{name} from expert {start[0]} on"
    faults: dict[str, list[Any]] = {
        f"{shown} has other bytes than were sent": [(name, wrong, *start), *rest],
        f"{shown} has shape {[1, *tensor.shape]}, expected {list(tensor.shape)}": [
            (name, tensor[None], *start),
            *rest,
        ],
        f"{shown} is missing": rest,
        "other is not in the manifest, or came twice": [*received, ("other", tensor)],
        f"{shown} is not in the manifest, or came twice": [*received, received[0]],
    }
    for message, weights in faults.items():
        with pytest.raises(McaError) as error:
            manifest.check(weights, version=base)
        assert message in str(error.value)
    if base is not None:
        with pytest.raises(
            McaError, match=rf"version {base}, the receiver has {base - 1};.*check\(..., version=<"
        ):
            manifest.check(received, version=base - 1)
    replace(manifest, tensors=tuple(replace(record, crc32=None) for record in manifest.tensors)).check(
        [(name, wrong, *start), *rest], version=base
    )


def test_a_sender_sends_what_changed_and_its_manifest_finds_every_fault(tmp_path: Path) -> None:
    path = tiny_hf.save("gpt_oss", tmp_path / "model", num_hidden_layers=2)
    run_ranks(4, updates, path, "ep2pp2")


def test_a_digest_depends_on_values_and_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    digests: list[Callable[[], torch.Tensor]] = [
        lambda: values,
        lambda: values.flip(0),
        lambda: values + 1,
        lambda: values.float(),
        lambda: -values,
        lambda: torch.zeros(2, 3),
        lambda: torch.zeros(2, 4),
    ]
    seen = {tuple(sender_module._digest(make()).tolist()) for make in digests}
    assert len(seen) == len(digests)
    monkeypatch.setattr(sender_module, "_STEP", 16)  # as the step of 4 million, in less time
    many = torch.zeros(sender_module._STEP + 3)
    many[-1] = 1
    for shift in (1, sender_module._STEP):
        assert not torch.equal(sender_module._digest(many), sender_module._digest(many.roll(-shift)))
    assert prod(sender_module._digest(many).shape) == 2
