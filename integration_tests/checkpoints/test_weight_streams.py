"""A live model as a stream: what arrives is what is saved, on whom it should, in bounded memory, and nobody waits."""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import tiny_hf
import tiny_omni
import tiny_vision
import torch
import transformers

from case_tables import WEIGHT_STREAMS
from cases import Case, as_params, group_by_ranks, needed, skip_unsupported
from harness import RanksFailed, run_ranks
from large_model import make_model
from layouts import arguments
from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_convert import conversion
from mca_models.megatron.state import export
from mca_models.megatron.tensors import to_numpy
from mca_models.quantization.fp8 import quantize
from mca_models.storage.safetensors import read_header
from mca_models.templates import FAMILIES, config_from_hf
from mca_models.templates.shapes import full_shape
from memory import MIB, peak
from reference import make_reference
from weight_streams import SMALL, checkpoint_of, facts_of, names_and_bytes, stored

pytestmark = pytest.mark.ranks

IDS = torch.arange(48).reshape(2, 24)


def stream_all(paths: dict[Case, Path], folder: Path) -> dict[Case, Any]:
    """For each model its error, or what arrives on this rank for each destination. Runs on every rank."""
    from mca_models.megatron import AutoModel

    found: dict[Case, Any] = {}
    for case, path in paths.items():
        try:
            models = AutoModel.from_pretrained(path, arguments(case.layout))
        except McaError as error:
            found[case] = str(error)
            continue
        arrived = {
            to: [facts_of(*each) for each in models.export_weights(to=to, bucket_bytes=SMALL)]
            for to in ("all", "first", "replicas")
        }
        models.save_pretrained_as_hf(folder / case.id, max_shard_bytes=50_000)
        assert models.config.vision or models.logits(IDS[:1]).isfinite().all(), "all layers take this dtype"
        found[case] = (arrived, models.rank_context.coordinates)
    return found


@dataclass(frozen=True)
class Streamed:
    """The sources, what was saved in ``folder`` by the case's id, and what arrived on every rank."""

    folder: Path
    sources: dict[str, Path]
    ranks: dict[Case, list[Any]]


@pytest.fixture(scope="module")
def streamed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Streamed:
    folder = tmp_path_factory.mktemp("streamed")
    sources = {
        model: checkpoint_of(model, folder / "hf") for model in {case.model for case in needed(request)}
    }
    found = Streamed(folder, sources, {})
    for num_ranks, cases in group_by_ranks(needed(request)).items():
        paths = {case: sources[case.model] for case in cases}
        ranks = run_ranks(num_ranks, stream_all, paths, folder, timeout=300 + 5 * len(cases))
        found.ranks.update({case: [rank[case] for rank in ranks] for case in cases})
    return found


# each axis, and every part that a stream puts together: experts, latents, images, virtual stages
DEFAULT = (
    *("qwen3-tied-tp2cp2sp", "qwen3_moe-tp2ep2etp1dp2sp", "deepseek_v3-tp2pp2vpp2sp", "qwen3_vl-tp2pp2sp"),
)


@pytest.mark.cases(0, always=DEFAULT)
@pytest.mark.parametrize("case", as_params(WEIGHT_STREAMS))
def test_a_stream_is_the_written_checkpoint(
    case: Case, streamed: Streamed, request: pytest.FixtureRequest
) -> None:
    ranks = streamed.ranks[case]
    if isinstance(ranks[0], str):
        skip_unsupported(request, ranks[0])
    source, expected = stored(streamed.sources[case.model]), stored(streamed.folder / case.id)
    assert expected.keys() == source.keys()
    # Megatron keeps the routers' biases in fp32, so they are written in fp32
    widened = {name for name in source if name.endswith(("e_score_correction_bias", ".expert_bias"))}
    assert [name for name in source if expected[name] != source[name] and name not in widened] == []
    assert all(expected[name][:2] == ("F32", source[name][1]) for name in widened)
    order = [name for name, _ in ranks[0][0]["all"]]
    assert sorted(order) == sorted(expected)
    for rank, (arrived, at) in enumerate(ranks):
        for to, mine in arrived.items():
            wanted = {"all": True, "first": rank == 0, "replicas": at.tp == at.cp == at.pp == 0}[to]
            assert [name for name, _ in mine] == (order if wanted else []), (rank, to)
            assert [name for name, facts in mine if facts != expected[name]] == [], (rank, to)


def forms(path: Path, layout: str) -> dict[str, Any]:
    """Return tensors that arrive cast, in flat buckets and as fp8, and bytes of other ranks. Runs on every rank."""
    from mca_models.megatron import AutoModel

    models = AutoModel.from_pretrained(path, arguments(layout))
    with received() as nbytes:
        plain = list(models.export_weights(bucket_bytes=SMALL))
    assert {name: facts for name, facts in (facts_of(*each) for each in plain)} == stored(path)
    buckets = list(models.export_buckets(bucket_bytes=SMALL))
    assert len(buckets) > 3
    for bucket in buckets:
        assert bucket.buffer.numel() <= max(
            SMALL, *(prod(e.shape) * e.dtype.itemsize for e in bucket.entries)
        )
        assert [entry.offset for entry in bucket.entries] == sorted(entry.offset for entry in bucket.entries)
    flat = [named for bucket in buckets for named in bucket.tensors()]
    assert list(map(names_and_bytes, flat)) == list(map(names_and_bytes, plain))
    for (name, wide), (other, narrow) in zip(
        plain, models.export_weights(dtype="float16", bucket_bytes=SMALL), strict=True
    ):
        assert name == other
        kept = name.endswith("e_score_correction_bias")
        assert torch.equal(narrow, wide if kept else wide.to(torch.float16)), name
    last = torch.distributed.get_rank() == 3
    held = next(tensor.data for _, tensor in models.canonical_parameters() if tensor.dim() == 2)
    kept = held.clone()
    held[0, 0] = 70000.0 if last else kept[0, 0]
    with pytest.raises(McaError, match="70000 overflows fp16" if last else "rank 3 failed"):
        list(models.export_weights(dtype="float16", bucket_bytes=SMALL))
    held.copy_(kept)
    fp8 = dict(models.export_weights(fp8=True, bucket_bytes=SMALL))
    _require_blocks(dict(plain), fp8)
    return {
        "bytes": nbytes[0],
        "held": sum(t.nbytes for _, t in models.canonical_parameters()),
        "fp8": len(fp8),
    }


def _require_blocks(plain: dict[str, torch.Tensor], fp8: dict[str, torch.Tensor]) -> None:
    """The device's blocks are those of NumPy, for each linear and nothing else."""
    scaled = {name for name in fp8 if name.endswith("_scale_inv")}
    linears = {name.removesuffix("_scale_inv") for name in scaled}
    assert fp8.keys() - scaled == plain.keys()
    for name, tensor in plain.items():
        if name not in linears:
            assert torch.equal(fp8[name], tensor)
            assert tensor.dim() == 1 or "embed" in name or "lm_head" in name or ".mlp.gate." in name, name
            continue
        values, scales = quantize(name, to_numpy(tensor))
        assert np.array_equal(fp8[name].view(torch.uint8).numpy(), values.view(np.uint8)), name
        assert np.array_equal(fp8[f"{name}_scale_inv"].numpy(), scales), name


class received:
    """Counts the bytes that this rank receives in the block."""

    def __enter__(self) -> list[int]:
        self._found, self._plain = [0], torch.distributed.batch_isend_irecv

        def counting(messages: Any) -> Any:
            self._found[0] += sum(m.tensor.nbytes for m in messages if m.op is torch.distributed.irecv)
            return self._plain(messages)

        torch.distributed.batch_isend_irecv = counting
        return self._found

    def __exit__(self, *_: object) -> None:
        torch.distributed.batch_isend_irecv = self._plain


def test_every_form_holds_the_same_weights(tmp_path: Path) -> None:
    path = make_reference("deepseek_v3", tmp_path).path
    whole = sum(info.nbytes for f in path.glob("*.safetensors") for info in read_header(f).tensors.values())
    for found in run_ranks(4, forms, path, "tp2ep2etp1pp2sp"):
        assert found["bytes"] + found["held"] == whole, "each byte comes once, and what a rank has not at all"
        assert found["fp8"] > 100


def fp8_refusals(config: McaModelConfig) -> list[str]:
    """The errors of a live model and of the converter that ``config`` is not written in fp8, without weights."""
    params = [param for param in FAMILIES[config.model_type].params(config) if not param.alias_of]
    wholes = {param.mca_name(): full_shape(param, config) for param in params}
    part = SimpleNamespace(info=SimpleNamespace(dtype="BF16"))
    file: Any = SimpleNamespace(
        config=config,
        params=params,
        parts=lambda _: [part],
        full_shape=lambda param: wholes[param.mca_name()],
    )
    place: Any = SimpleNamespace(world_size=1)
    live: Any = SimpleNamespace(config=config, rank_context=place, canonical_parameters=lambda: [])
    found = []
    with (
        patch.object(
            export, "gather_param_specs", lambda _: {name: ("BF16", shape) for name, shape in wholes.items()}
        ),
        patch.object(export, "stream", lambda *_: closed(())),
        patch.object(conversion, "fills_to_hf", lambda *_: []),
    ):
        for write in (
            lambda: list(export.export_buckets(live, export.WeightRequest(fp8=True))),
            lambda: conversion.plan_to_hf(file, fp8=True),
        ):
            try:
                write()
            except McaError as error:
                found.append(str(error))
    return found


def closed(values: Iterable[Any]) -> Iterator[Any]:
    """A generator of ``values``."""
    yield from values


def test_streams_and_the_converter_refuse_fp8_of_the_same_families(every_case: bool) -> None:
    """By default of those that are refused, of some with several parts, and of every tenth."""
    described = {kind: {**tiny_hf.SIZE, **more, "model_type": kind} for kind, more in tiny_hf.ALL.values()}
    described |= {kind: tiny_vision.described(case) for case, (kind, *_) in tiny_vision.CASES.items()}
    described |= {kind: tiny_omni.described(kind) for kind in tiny_omni.WHOLE}
    assert described.keys() == FAMILIES.keys()
    chosen = [kind for kind, family in FAMILIES.items() if family.fp8_unsupported]
    chosen += ["qwen2_vl", "llama4", *sorted(FAMILIES)[::10]]
    for kind in FAMILIES if every_case else chosen:
        settings = described[kind]
        config = config_from_hf(transformers.AutoConfig.for_model(**settings).to_dict())
        messages = fp8_refusals(config)
        expected = (
            []
            if FAMILIES[kind].text(config).fp8_unsupported is None
            else [f"fp8: transformers reads no fp8 blocks of {kind}"] * 2
        )
        assert [message.partition(" models")[0] for message in messages] == expected, kind


def misuse(path: Path) -> dict[str, str]:
    """Return the error on each rank when one of four leaves a stream. Runs on every rank."""
    from mca_models.megatron import AutoModel

    models = AutoModel.from_pretrained(path, arguments("tp2pp2"))
    rank = torch.distributed.get_rank()
    said: dict[str, str] = {}

    def take(key: str, consume: Any, **options: Any) -> None:
        started = time.monotonic()
        try:
            consume(models.export_weights(**{"bucket_bytes": SMALL, **options}))
        except (McaError, RuntimeError) as error:
            said[key] = str(error)
        assert time.monotonic() - started < 20

    take("breaks", lambda stream: next(stream) if rank == 2 else list(stream))
    take("first breaks", lambda stream: next(stream) if rank == 0 else list(stream), to="first")
    take("all break", next)
    take("raises", _raising if rank == 1 else list)
    with _failing_piece(rank == 3):
        take("sender fails", list, to="first")
    take("goes on afterwards", list)
    for options in ({"to": "none"}, {"dtype": "int8"}, {"bucket_bytes": 0}, {"merged": True}):
        take(f"{options}", list, **options)
    for key, act in {
        "destinations": lambda: models.export_weights(to="first" if rank == 2 else "all"),
        "invalid on one": lambda: models.export_weights(dtype="int8" if rank == 1 else None),
        "folders": lambda: models.save_pretrained(path / f"out{rank % 2}"),
        "shards": lambda: models.save_pretrained_as_hf(path / "out", max_shard_bytes=1000 * (rank + 1)),
        "temperatures": lambda: models.log_probs(IDS, temperature=1.0 + (rank == 3)),
        "lengths": lambda: models.logits(IDS[:, : 20 + rank // 2]),
        "methods": lambda: models.export_weights() if rank else models.save_pretrained(path / "out"),
    }.items():
        with pytest.raises(McaError) as error:
            act()
        said[key] = str(error.value)
    return said


def _raising(stream: Iterator[Any]) -> None:
    for number, _ in enumerate(stream):
        if number == 3:
            raise RuntimeError("the consumer's own error")


def _failing_piece(here: bool) -> AbstractContextManager[object]:
    """Make this rank unable to send its shard, if ``here``."""
    from mca_models.megatron.state.stream import _Transfer

    error = RuntimeError("no memory")
    return patch.object(_Transfer, "_local_piece", side_effect=error) if here else nullcontext()


SAME = "; give all ranks the same value"
DIFFERENT = {
    "destinations": f"export_weights: to differs between ranks: 'all' on ranks 0, 1, 3, 'first' on rank 2{SAME}",
    "invalid on one": f"export_weights: dtype differs between ranks: None on ranks 0, 2, 3, 'int8' on rank 1{SAME}",
    "folders": "save_pretrained: directory differs between ranks: 'PATH/out0' on ranks 0, 2, 'PATH/out1' on ranks 1, 3"
    + SAME,
    "shards": "save_pretrained_as_hf: max_shard_bytes differs between ranks: 1000 on rank 0, 2000 on rank 1, "
    f"3000 on rank 2, 4000 on rank 3{SAME}",
    "temperatures": f"log_probs: temperature differs between ranks: 1.0 on ranks 0, 1, 2, 2.0 on rank 3{SAME}",
    "lengths": "logits: the shape of input_ids differs between ranks: [2, 20] on ranks 0, 1, [2, 21] on ranks 2, 3"
    + SAME,
    "methods": "ranks called different methods: save_pretrained on rank 0, export_weights on ranks 1, 2, 3; call the "
    "same one on all ranks",
}
"""What every rank is reported where their arguments differ."""


def test_a_rank_that_leaves_or_asks_for_something_else_is_reported_on_all(tmp_path: Path) -> None:
    path = make_reference("llama", tmp_path).path
    found = run_ranks(4, misuse, path)
    left = "rank {} failed or stopped receiving weights before the last one; all ranks must run the loop to its end"
    for rank, said in enumerate(found):
        for options in ({"to": "none"}, {"dtype": "int8"}, {"bucket_bytes": 0}):
            assert said.pop(f"{options}")
        assert said.pop("{'merged': True}") == "merged=True: this model has no adapter; remove merged"
        for key, text in DIFFERENT.items():
            assert said.pop(key).replace(str(path), "PATH") == text
        expected = {
            "breaks": None if rank == 2 else left.format(2),
            "first breaks": None if rank == 0 else left.format(0),
            "raises": "the consumer's own error" if rank == 1 else left.format(1),
            "sender fails": "no memory" if rank == 3 else left.format(3),
        }
        assert said == {key: value for key, value in expected.items() if value}


def dying(path: Path, folder: Path) -> None:
    """One rank is killed while weights are streamed. Runs on every rank."""
    from mca_models.megatron import AutoModel

    models = AutoModel.from_pretrained(path, arguments("tp2pp2"))
    rank = torch.distributed.get_rank()
    try:
        for number, _ in enumerate(models.export_weights(bucket_bytes=SMALL)):
            if rank == 3 and number == 2:
                os._exit(9)
    except McaError as error:
        (folder / str(rank)).write_text(str(error))
        os._exit(1)  # as a program that ends on an error: what waits for it is reported too


def test_a_rank_that_dies_ends_all_ranks(tmp_path: Path) -> None:
    path = make_reference("llama", tmp_path / "hf").path
    with pytest.raises(RanksFailed):
        run_ranks(4, dying, path, tmp_path, timeout=60)
    said = {file.name: file.read_text() for file in tmp_path.iterdir() if file.is_file()}
    assert said.keys() == {"0", "1", "2"}
    for rank, text in said.items():
        assert text.startswith(f"the stream of weights stopped on rank {rank}: another rank was lost (")


def stream_and_measure(path: Path) -> tuple[int, int]:
    """Bytes beyond the model while it is streamed, and of the bucket. Runs on every rank."""
    from mca_models.megatron import AutoModel

    models = AutoModel.from_pretrained(path, arguments("tp2"))
    bucket = 16 * MIB
    for _ in models.export_weights(bucket_bytes=MIB, to="first"):
        pass
    with peak() as most:
        for _name, _tensor in models.export_weights(bucket_bytes=bucket):
            pass
    return most[0], bucket


def test_memory_is_two_buckets_and_the_largest_parameter(tmp_path: Path) -> None:
    path = make_model(tmp_path / "hf")
    largest = max(info.nbytes for f in path.glob("*.safetensors") for info in read_header(f).tensors.values())
    for most, bucket in run_ranks(2, stream_and_measure, path):
        assert bucket < most < 2 * bucket + largest + 4 * MIB
