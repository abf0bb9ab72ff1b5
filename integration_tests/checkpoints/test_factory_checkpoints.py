"""HF -> factory -> disk -> factory or HF keeps every bit, for each family, dtype and layout."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import Case, as_params, group_by_ranks, needed, product
from checkpoint_files import round_trip, tensors_of
from harness import RanksFailed, run_ranks
from layouts import arguments, world_size
from mca_convert.cli import main as convert
from mca_models.checkpoint.mca_directory import McaSource
from reference import Reference, make_reference

pytestmark = pytest.mark.ranks

LAYOUTS = ("tp1", "tp2", "pp2vpp2", "tp2pp2", "tp2pp2vpp2")
MODELS = ("llama", "mistral", "qwen2-tied", "qwen3", "qwen3-tied")
SAVED = tuple(
    Case(case.model, case.layout, (dtype,))
    for case in product(MODELS, LAYOUTS)
    for dtype in ("float32", "bfloat16", "float16")
    if dtype == "bfloat16" or case.layout in ("tp1", "tp2pp2vpp2")
)
SAVED += tuple(
    Case(model, layout, ("float16",))
    for model, layout in (("mistral", "tp2pp2"), ("qwen2-tied", "pp2vpp2"), ("qwen3", "tp2"))
)
READ = (
    *(Case("qwen3-tied", "tp1", ("float32",)), Case("qwen3-tied", "tp2pp2vpp2", ("float32",))),
    *(Case("llama", "tp2", ("bfloat16",)), Case("llama", "tp2pp2", ("bfloat16",))),
)
"""References for tests without cases."""


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cases in Hugging Face's and mca's format, and the references in the folder ``hf``."""
    folder = tmp_path_factory.mktemp("factory")
    cases = [*READ, *needed(request)]
    make_reference("llama", folder / "hf")
    for size, group in group_by_ranks(dict.fromkeys(cases)).items():
        run_ranks(size, round_trip, [(source_of(case, folder), case.layout) for case in group], folder)
    return folder


def source_of(case: Case, folder: Path) -> Path:
    return make_reference(case.model, folder / "hf", *case.options).path


def exported(case: Case, folder: Path, kind: str) -> Path:
    """The directory that `round_trip` writes."""
    return folder / f"{case.model}-{case.options[0]}-{case.layout}-{kind}"


@pytest.mark.cases(
    0,
    always=[
        *("qwen3-tied-tp1-float32", "qwen3-tied-tp2pp2vpp2-float32", "llama-tp2pp2-bfloat16"),
        *("mistral-tp2-bfloat16", "qwen2-tied-pp2vpp2-bfloat16", "qwen3-tp2-float16"),
    ],
)
@pytest.mark.parametrize("case", as_params(SAVED))
def test_hf_export_is_bit_exact(case: Case, saved: Path) -> None:
    source, export = source_of(case, saved), exported(case, saved, "hf")
    assert tensors_of(export) == tensors_of(source)
    original, written = (json.loads((path / "config.json").read_text()) for path in (source, export))
    assert written == original


CONVERTED = [case for case in SAVED if case.options == ("bfloat16",)]
DEFAULT = pytest.mark.cases(
    0, always=["llama-tp2pp2-bfloat16", "mistral-tp2-bfloat16", "qwen2-tied-pp2vpp2-bfloat16"]
)


@DEFAULT
@pytest.mark.parametrize("case", as_params(CONVERTED))
def test_mca_checkpoint_is_complete(case: Case, saved: Path) -> None:
    source = McaSource(exported(case, saved, "mca"))
    assert source.config.layout == arguments(case.layout).layout()
    stored = sum(info.nbytes for info in source.tensors())
    original = sum(len(data) for _, _, data in tensors_of(source_of(case, saved)).values())
    assert stored == pytest.approx(original, rel=0.02), "every shard is stored once"


@DEFAULT
@pytest.mark.parametrize("case", as_params(CONVERTED))
def test_the_converter_writes_the_same_files(case: Case, saved: Path, tmp_path: Path) -> None:
    sizes = arguments(case.layout).layout()
    flags = [
        f"--tensor_model_parallel_size={sizes.tp}",
        f"--pipeline_model_parallel_size={sizes.pp}",
        f"--virtual_pipeline_model_parallel_size={sizes.vpp}",
    ]
    converted = tmp_path / "converted"
    assert convert([f"--checkpoint_path={source_of(case, saved)}", f"--output_path={converted}", *flags]) == 0
    written = exported(case, saved, "mca")
    assert tensors_of(converted) == tensors_of(written)
    assert McaSource(converted).config == McaSource(written).config


def reload(paths: list[Path], reference: Reference, layout: str) -> list[float]:
    """Loads MCA directories of other layouts on ``layout``. Runs on every rank."""
    from mca_models.megatron import AutoModel

    return [
        float(
            (
                AutoModel.from_pretrained(path, arguments(layout)).logits(reference.input_ids)
                - reference.logits
            )
            .abs()
            .max()
        )
        for path in paths
    ]


@pytest.mark.cases(0, always=["tp1", "tp2pp2vpp2"])
@pytest.mark.parametrize("layout", ["tp1", "tp2", "tp2pp2vpp2"])
def test_any_layout_loads_into_any_other(layout: str, saved: Path) -> None:
    reference = make_reference("qwen3-tied", saved / "hf")
    paths = [saved / f"qwen3-tied-float32-{other}-mca" for other in ("tp1", "tp2pp2vpp2")]
    for found in run_ranks(world_size(layout), reload, paths, reference, layout):
        assert max(found) <= 1e-4


def keeps_layout(path: Path) -> tuple[str, str]:
    from mca_models.megatron import AutoModel

    model = AutoModel.from_pretrained(path)
    return str(model.config.layout), model.config.dtype


def test_an_mca_directory_brings_its_own_layout(saved: Path) -> None:
    from mca_config.layout import ParallelLayout

    expected = str(ParallelLayout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2))
    found = run_ranks(4, keeps_layout, saved / "llama-bfloat16-tp2pp2-mca")
    assert found == [(expected, "bfloat16")] * 4


def random_logits(reference: Reference, layouts: list[str], *seeds: int) -> list[torch.Tensor]:
    from mca_models.megatron import AutoModel

    config = replace(
        AutoModel.from_pretrained(reference.path, arguments(layouts[0])).config, init_method_std=0.2
    )
    return [
        AutoModel.from_config(config, arguments(layout), dtype="float32", seed=seed).logits(
            reference.input_ids
        )
        for layout in layouts
        for seed in seeds
    ]


@pytest.mark.cases(0, always=["qwen2-tied"])
@pytest.mark.parametrize("model", ["qwen2-tied", "qwen3"])
def test_random_models_are_the_same_on_every_layout(model: str, saved: Path, every_case: bool) -> None:
    reference = make_reference(model, saved / "hf")
    one, different = run_ranks(1, random_logits, reference, ["tp1"], 5, 6)[0]
    layouts = ["tp2pp2", "tp2pp2vpp2"] if every_case else ["tp2pp2vpp2"]
    others = run_ranks(4, random_logits, reference, layouts, 5)[0]
    assert float(one.std()) > 0.1
    assert max(float((one - other).abs().max()) for other in others) <= 1e-4
    assert float((one - different).abs().max()) > 0.1


def load(path: Path, layout: str, **options: Any) -> str:
    from mca_models.megatron import AutoModel

    return str(AutoModel.from_pretrained(path, arguments(layout), **options).chunks[0].config.params_dtype)


def test_dtype_can_be_chosen(saved: Path) -> None:
    path = saved / "hf" / "llama-float32"
    assert run_ranks(1, load, path, "tp1", dtype="bfloat16") == ["torch.bfloat16"]


@pytest.mark.parametrize(
    "layout,message",
    [("tp2pp3", "num_layers"), ("tp8", "num_attention_heads"), ("ep2", "no experts")],
)
def test_a_layout_that_does_not_fit_is_refused(layout: str, message: str, saved: Path) -> None:
    with pytest.raises(RanksFailed, match=f"UsageError.*{message}"):
        run_ranks(1, load, saved / "hf" / "llama-float32", layout)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"McaError.*nowhere.*no such directory"):
        run_ranks(1, load, tmp_path / "nowhere", "tp1")


def save_into(path: Path, target: Path) -> None:
    from mca_models.megatron import AutoModel

    AutoModel.from_pretrained(path).save_pretrained(target)


def test_a_directory_that_is_not_empty_is_not_overwritten(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(RanksFailed, match="exists and is not empty"):
        run_ranks(2, save_into, saved / "llama-bfloat16-tp2-mca", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]
