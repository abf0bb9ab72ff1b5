"""HF -> factory -> disk -> factory or HF keeps every bit, for each family, dtype and layout."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_files import round_trip, tensors_of
from harness import RanksFailed, run_ranks
from layouts import EVERY, arguments, spread, world_size
from mca_convert.cli import main as convert
from mca_models.checkpoint.mca_directory import McaSource
from reference import Reference, make_reference

pytestmark = pytest.mark.ranks

CASES = ("llama", "mistral", "qwen2-tied", "qwen3", "qwen3-tied")
DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = ("tp1", "tp2", "pp2vpp2", "tp2pp2", "tp2pp2vpp2")
GRID = [
    (case, dtype, layout)
    for case in CASES
    for dtype in DTYPES
    for layout in LAYOUTS
    if EVERY and (dtype == "bfloat16" or layout in ("tp1", "tp2pp2vpp2"))
]
PAIRS = [*spread(CASES, LAYOUTS), ("llama", "tp2"), ("llama", "tp2pp2")]
LOADED = [
    ("qwen3-tied", "float32", "tp1"),
    ("qwen3-tied", "float32", "tp2pp2vpp2"),
    ("llama", "float32", "tp1"),
]
HALVES = [(case, "float16", layout) for case, layout in zip(CASES, reversed(LAYOUTS), strict=True)]
GRID = list(dict.fromkeys([*GRID, *((case, "bfloat16", layout) for case, layout in PAIRS), *LOADED, *HALVES]))
PAIRS = [(case, layout) for case, dtype, layout in GRID if dtype == "bfloat16"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases in all dtypes, round-tripped on all layouts, and the references beside them."""
    folder = tmp_path_factory.mktemp("factory")
    pairs = [(make_reference(case, folder / "hf", dtype).path, layout) for case, dtype, layout in GRID]
    for size in (1, 2, 4):
        run_ranks(size, round_trip, [pair for pair in pairs if world_size(pair[1]) == size], folder)
    return folder


@pytest.mark.parametrize("case,dtype,layout", GRID)
def test_hf_export_is_bit_exact(case: str, dtype: str, layout: str, saved: Path) -> None:
    source, export = saved / "hf" / f"{case}-{dtype}", saved / f"{case}-{dtype}-{layout}-hf"
    assert tensors_of(export) == tensors_of(source)
    original, written = (json.loads((path / "config.json").read_text()) for path in (source, export))
    assert written == original


@pytest.mark.parametrize("case,layout", PAIRS)
def test_mca_checkpoint_is_complete(case: str, layout: str, saved: Path) -> None:
    path = saved / f"{case}-bfloat16-{layout}-mca"
    source = McaSource(path)
    assert source.config.layout == arguments(layout).layout()
    stored = sum(info.nbytes for info in source.tensors())
    original = sum(len(data) for _, _, data in tensors_of(saved / "hf" / f"{case}-bfloat16").values())
    assert stored == pytest.approx(original, rel=0.02), "every piece is stored once"


@pytest.mark.parametrize("case,layout", PAIRS)
def test_the_converter_writes_the_same_files(case: str, layout: str, saved: Path, tmp_path: Path) -> None:
    sizes = arguments(layout).layout()
    flags = [
        f"--tensor_model_parallel_size={sizes.tp}",
        f"--pipeline_model_parallel_size={sizes.pp}",
        f"--virtual_pipeline_model_parallel_size={sizes.vpp}",
    ]
    source = saved / "hf" / f"{case}-bfloat16"
    converted = tmp_path / "converted"
    assert convert([f"--checkpoint_path={source}", f"--output_path={converted}", *flags]) == 0
    written = saved / f"{case}-bfloat16-{layout}-mca"
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


def random_logits(reference: Reference, layouts: list[str], seed: int) -> list[torch.Tensor]:
    from mca_models.megatron import AutoModel

    config = replace(
        AutoModel.from_pretrained(reference.path, arguments(layouts[0])).config, init_method_std=0.2
    )
    return [
        AutoModel.from_config(config, arguments(layout), dtype="float32", seed=seed).logits(
            reference.input_ids
        )
        for layout in layouts
    ]


@pytest.mark.cases(0, always=["qwen2-tied"])
@pytest.mark.parametrize("case", ["qwen2-tied", "qwen3"])
def test_random_models_are_the_same_on_every_layout(case: str, saved: Path) -> None:
    reference = make_reference(case, saved / "hf")
    (one,) = run_ranks(1, random_logits, reference, ["tp1"], 5)[0]
    others = run_ranks(4, random_logits, reference, ["tp2pp2", "tp2pp2vpp2"], 5)[0]
    (different,) = run_ranks(1, random_logits, reference, ["tp1"], 6)[0]
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
    with pytest.raises(RanksFailed, match=f"McaError.*{message}"):
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
