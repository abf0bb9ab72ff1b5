"""Files and buckets of an export as Hugging Face: no sums that nothing reads, no bucket beyond its limit."""

import inspect
import json
import re
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save as saved_bytes

from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_models.megatron.peft.models import PeftModels
from mca_models.megatron.state import export, save, torch_dist
from mca_models.megatron.state.buckets import Unit
from mca_models.megatron.state.export import packed_buckets
from mca_models.megatron.state.sender import WeightSender
from mca_models.megatron.virtual_models import VirtualModels
from mca_models.weights.rules import Param


def test_no_checksum_is_made_of_what_no_manifest_names(tmp_path: Path) -> None:
    layout: Any = SimpleNamespace(files={"a.safetensors": ["x"]}, specs=lambda name: [("x", "U8", (4,))])
    place: Any = SimpleNamespace(world_size=1, rank=0)
    with ExitStack() as files:
        writer = save._open_files(place, layout, tmp_path, files)["x"]
        writer.write("x", b"abcd", 0)
    assert (tmp_path / "a.safetensors").read_bytes().endswith(b"abcd")
    assert writer.record.crc32 == 0


def test_each_rank_writes_each_second_file_of_two_and_receives_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameter q is split over two files; h is a tied copy of e, in another file."""
    params = [Param(mca=name, hf=tuple(hf)) for name, hf in {"e": "e", "q": "ab", "z": "z"}.items()]
    layout: Any = SimpleNamespace(
        files={"1.safetensors": ["e", "a"], "2.safetensors": ["b", "h"], "3.safetensors": ["z"]},
        params=params,
        specs=lambda name: [(each, "U8", (2,)) for each in layout.files[name]],
        written_as=lambda name: ("e", "h") if name == "e" else (name,),
    )
    units: list[Unit] = []
    for name, replacement in {
        "plan_buckets": lambda found, specs, config, limit: units.extend(found) or [],
        "stream": lambda source, buckets: iter(()),
        "run_on_all_ranks": lambda act: opened.update(act() or {}) if not opened else None,
    }.items():
        monkeypatch.setattr(save, name, replacement)
    written = []
    for rank in (0, 1):
        place: Any = SimpleNamespace(world_size=2, rank=rank)
        with ExitStack() as files:
            writers = save._open_files(place, layout, tmp_path, files)
            for name, writer in writers.items():
                writer.write(name, b"xy", 0)
        written.append(set(writers))
    assert written == [{"e", "a", "z"}, {"b", "h"}]
    opened = {"nothing": None}
    source: Any = SimpleNamespace(rank_context=SimpleNamespace(world_size=2, rank=0), config=None)
    save._stream(source, layout, {}, tmp_path)
    assert [unit.targets for unit in units] == [{0, 1}, {0, 1}, {0}]
    assert json.loads((tmp_path / "2.safetensors").read_bytes()[8:].split(b"}}")[0] + b"}}")[
        "__metadata__"
    ] == {"format": "pt"}


def test_a_file_that_no_rank_wrote_whole_is_named(tmp_path: Path) -> None:
    layout: Any = SimpleNamespace(files={"a.safetensors": ["x"]}, specs=lambda name: [("x", "U8", (4,))])
    with pytest.raises(McaError, match=re.escape(f"{tmp_path}/iter_0000001/a.safetensors: tensor x was")):
        save._finish_mca(SimpleNamespace(), layout, [{"a.safetensors": {}}], tmp_path)  # type: ignore[arg-type]


def test_a_rank_that_cannot_write_raises_its_first_error(tmp_path: Path) -> None:
    faults: list[Exception] = []
    layout: Any = SimpleNamespace(written_as=lambda name: (name, f"{name} copied"))
    entry = SimpleNamespace(name="x", view=lambda buffer: buffer)
    experts = [Param(mca=f"w{number}", hf=("x",), expert=number, stacked=number > 0) for number in (0, 2)]
    for param, start in zip(experts, (0, 2 * 8), strict=True):
        found: list[Any] = []
        writer: Any = SimpleNamespace(write=lambda *written, found=found: found.append(written))
        bucket = SimpleNamespace(slots=[SimpleNamespace(param=param, outputs=[entry])])
        filled: Any = SimpleNamespace(bucket=bucket, buffer=torch.arange(2.0))
        save._write(filled, {"x copied": writer}, layout, faults)
        ((name, data, offset),) = found
        assert (name, data.tobytes(), offset) == ("x copied", torch.arange(2.0).numpy().tobytes(), start)
    assert not faults
    save._write(filled, {"x": None}, layout, faults)  # type: ignore[dict-item]
    save._write(filled, {"x copied": 3}, layout, faults)  # type: ignore[dict-item]
    assert len(faults) == 2
    with ExitStack() as files, pytest.raises(AttributeError, match="NoneType"):
        save._close_files(files, faults)
    files.callback(faults.clear)
    save._close_files(files, [])
    assert not faults


def test_a_bucket_has_the_tensors_that_its_limit_allows() -> None:
    tensors = [(str(size), torch.zeros(size, dtype=torch.uint8)) for size in (512, 512, 256, 512, 2048, 256)]
    found = [[entry.name for entry in bucket.entries] for bucket in packed_buckets(tensors, 1024)]
    assert found == [["512", "512"], ["256", "512"], ["2048"], ["256"]]


@pytest.mark.parametrize("models", [VirtualModels, PeftModels])
def test_each_argument_of_an_export_reaches_its_buckets(models: type[VirtualModels]) -> None:
    given = {
        "to": "first",
        "bucket_bytes": 7,
        "dtype": "float16",
        "fp8": True,
        "merged": True,
        "per_expert": True,
    }
    names = inspect.signature(models.export_weights).parameters.keys() - {"self"}
    passed: dict[str, object] = {}
    instance: Any = SimpleNamespace(export_buckets=lambda **arguments: passed.update(arguments) or ())
    assert not list(models.export_weights(instance, **{name: given[name] for name in names}))
    assert passed == {name: given[name] for name in names}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"to": "last"}, "'last' is none of all, first"),
        ({"dtype": "int4"}, "'int4' is none of"),
        ({"bucket_bytes": 0}, "bucket_bytes is 0; expected a positive number"),
    ],
)
def test_an_invalid_argument_of_an_export_is_named(
    values: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "require_same_arguments", lambda *_, **__: None)  # needs process groups
    export.WeightRequest(bucket_bytes=1, dtype="float16", to="first").require_valid()
    with pytest.raises(McaError, match=words):
        export.WeightRequest(**values).require_valid()


@pytest.mark.parametrize(
    ("split", "bucket_bytes", "limit", "first_experts"),
    [(False, 1, 1, [None]), (True, 1, 1, [0, 1, 2]), (True, 99, 66, [0, 2])],
)
def test_stacked_experts_are_split_only_if_asked(
    split: bool,
    bucket_bytes: int,
    limit: int,
    first_experts: list[int | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two experts fit into the limit of 66 bytes: two thirds of 99, because buckets overlap."""
    experts = [Param(mca="w{expert}", hf=("experts",), expert=number, stacked=True) for number in range(3)]
    specs = {param.mca_name(): ("F32", (2, 4)) for param in experts}
    layout = SimpleNamespace(params=experts, scales=None)
    sent: list[Unit] = []
    limits: list[int] = []

    def plan(units: list[Unit], specs: object, config: object, max_bytes: int) -> list[object]:
        sent.extend(units)
        limits.append(max_bytes)
        return []

    for name, replacement in {
        "gather_param_specs": lambda models: specs,
        "model_params": lambda models: experts,
        "HfTensors": lambda *arguments, **keywords: layout,
        "plan_buckets": plan,
        "WeightSource": lambda *arguments: None,
        "stream": lambda *arguments: (each for each in ()),
    }.items():
        monkeypatch.setattr(export, name, replacement)
    models: Any = SimpleNamespace(
        canonical_parameters=list, config=None, rank_context=SimpleNamespace(rank=0, world_size=1)
    )
    request = export.WeightRequest(bucket_bytes=bucket_bytes, split_experts=split)
    assert not list(export.export_buckets(models, request))
    assert limits == [limit]
    assert [unit.start for unit in sent] == first_experts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_manifest_has_the_safetensors_code_of_each_dtype(dtype: torch.dtype) -> None:
    (bucket,) = packed_buckets([("x", torch.zeros(4).to(dtype))], 1024)
    (record,) = WeightSender(SimpleNamespace(), SimpleNamespace())._records(bucket)  # type: ignore[arg-type]
    assert (record.name, record.shape) == ("x", (4,))
    header = json.loads(saved_bytes({"x": torch.zeros(4).to(dtype)})[8:].split(b"}}")[0] + b"}}")
    assert record.dtype == header["x"]["dtype"]


def test_megatron_reads_a_model_without_optimizer_and_random_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the arguments that Megatron-LM compares with its own, among them the layout's sizes."""
    monkeypatch.setattr(torch_dist.features, "positions", lambda config: "rope")
    config = SimpleNamespace(
        num_layers=2,
        hidden_size=8,
        attention=SimpleNamespace(num_attention_heads=4),
        mlp=SimpleNamespace(ffn_hidden_size=16),
        padded_vocab_size=128,
        max_position_embeddings=64,
    )
    layout = ParallelLayout(tensor_model_parallel_size=2, pipeline_model_parallel_size=3)
    models: Any = SimpleNamespace(config=config, rank_context=SimpleNamespace(layout=layout))
    written = vars(torch_dist._arguments(models))
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "ffn_hidden_size": 16}
    sizes |= {"padded_vocab_size": 128, "max_position_embeddings": 64}
    sizes |= {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3, "context_parallel_size": 1}
    assert {name: written[name] for name in sizes} == sizes
    switches = ("add_position_embedding", "no_save_optim", "no_save_rng")
    assert [written[name] for name in switches] == [True] * 3
    assert (written["ckpt_format"], written["position_embedding_type"]) == ("torch_dist", "rope")
    assert "virtual_pipeline_model_parallel_size" not in written, "numbers and names only"
