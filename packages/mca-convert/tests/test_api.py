"""The functions of the package, as a program calls them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from files import assert_same_tensors
from safetensors.torch import load_file, save_file

import mca_convert
from mca_config import DistributingParallelArguments, McaError, ParallelLayout
from mca_convert import api, convert, inspect, plan, verify
from mca_convert.compare import _different

LAYOUT = ParallelLayout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)


def changed_copy(source: Path, target: Path, name: str, index: tuple[int, ...]) -> Path:
    """A copy of a Hugging Face checkpoint in which one element of one tensor is 0.5 larger."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    tensors[name][index] += 0.5
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def random_adapter(base: Path, folder: Path) -> Path:
    """A PEFT adapter on the down projections of ``base``."""
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        if name.endswith("down_proj.weight"):
            stem, (rows, columns) = f"base_model.model.{name.removesuffix('.weight')}", weight.shape
            tensors |= {
                f"{stem}.lora_A.weight": torch.randn(2, columns),
                f"{stem}.lora_B.weight": torch.randn(rows, 2),
            }
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("workers", "memory", "used"),
    [(None, None, 5), (None, 1 << 20, 5), (None, 600 << 10, 3), (None, 192 << 10, 1), (2, 384 << 10, 2)],
)
def test_threads_fit_the_memory_limit(workers, memory, used, monkeypatch) -> None:
    monkeypatch.setattr(api, "default_workers", lambda: 5)
    limits = api._limits(workers, memory)
    assert limits.workers == used
    assert memory is None or 3 * used * limits.buffer_bytes <= memory


def test_a_model_goes_to_mca_and_back_bit_for_bit(tiny, tmp_path: Path) -> None:
    source = tiny("qwen3_moe", "bfloat16")
    to_mca = convert(source, tmp_path / "mca", layout=LAYOUT)
    assert (to_mca.target, to_mca.layout, to_mca.is_adapter) == ("mca", LAYOUT, False)
    written = list((tmp_path / "mca").rglob("*.safetensors"))
    assert to_mca.files == len(written) and to_mca.path == tmp_path / "mca"
    assert 0 < to_mca.nbytes < sum(file.stat().st_size for file in written)
    to_hf = convert(str(tmp_path / "mca"), str(tmp_path / "hf"))
    assert (to_hf.target, to_hf.layout, to_hf.model_type) == ("hf", None, "qwen3_moe")
    assert_same_tensors(source, tmp_path / "hf")
    outcome = verify(source, tmp_path / "mca")
    assert outcome.same and 2 * outcome.elements == to_hf.nbytes


def test_sizes_that_are_not_set_are_those_of_the_source(tiny, tmp_path: Path) -> None:
    convert(tiny("llama"), tmp_path / "a", layout=LAYOUT)
    sizes = DistributingParallelArguments(tensor_model_parallel_size=1)
    result = convert(tmp_path / "a", tmp_path / "b", to="mca", layout=sizes)
    assert result.layout == ParallelLayout(pipeline_model_parallel_size=2)
    assert verify(tmp_path / "a", tmp_path / "b").same


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("exists", [False, True])
def test_files_that_appear_during_a_conversion_are_not_overwritten(
    exists: bool, adapter: bool, tiny, tmp_path: Path
) -> None:
    source, target = tiny("llama"), tmp_path / "out"
    path = random_adapter(source, tmp_path / "adapter") if adapter else None
    if exists:
        convert(source, target, adapter_path=path)
    file = target / "precious.txt"

    def write(done: int, total: int) -> None:
        target.mkdir(exist_ok=True)
        file.touch()

    with pytest.raises(McaError, match=r"precious.txt, which is not part|has no checkpoint|is not empty"):
        convert(source, target, adapter_path=path, overwrite=True, progress=write)
    assert file.exists()
    file.unlink()
    if exists:
        assert convert(source, target, adapter_path=path, overwrite=True).path == target


def test_verify_names_the_one_element_that_differs(tiny, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    changed = changed_copy(tiny("llama"), tmp_path / "changed", name, (3, 5))
    mca = convert(tiny("llama"), tmp_path / "mca", layout=LAYOUT).path
    outcome = verify(mca, changed)
    assert not outcome.same and not outcome.problems and list(outcome.differences) == [name]
    found = outcome.differences[name]
    assert (found.elements, found.index) == (1, (3, 5))
    assert found.values[1] - found.values[0] == pytest.approx(found.largest) == pytest.approx(0.5)
    assert verify(mca, changed, tolerance=0.6).same
    assert not verify(mca, changed, tolerance=0).same


def test_inspect_describes_every_kind(tiny, tmp_path: Path) -> None:
    hf = inspect(tiny("llama"), top=2)
    assert hf.kind == "Hugging Face checkpoint" and hf.facts["model_type"] == "llama" and len(hf.biggest) == 2
    mca = inspect(convert(tiny("llama"), tmp_path / "mca", layout=LAYOUT).path, values=True)
    assert mca.sizes["layout"]["tensor_model_parallel_size"] == 2 and mca.not_finite == {}
    assert mca.facts["parameters"] == hf.facts["parameters"] and mca.problem is None
    next((tmp_path / "mca").rglob("tp_01.safetensors")).unlink()
    problem = inspect(tmp_path / "mca").problem
    assert problem is not None and "tp_01.safetensors" in problem


def test_an_adapter_is_converted_inspected_compared_and_merged(tiny, tmp_path: Path) -> None:
    base, adapter = tiny("llama"), random_adapter(tiny("llama"), tmp_path / "adapter")
    result = convert(base, tmp_path / "mca", adapter_path=adapter, layout=LAYOUT)
    assert result.is_adapter and result.layout == LAYOUT and result.nbytes > 0
    assert inspect(tmp_path / "mca").kind == "MCA LoRA adapter"
    back = convert(None, tmp_path / "peft", adapter_path=tmp_path / "mca")
    assert back.target == "hf" and back.tensors == result.tensors
    outcome = verify(adapter, tmp_path / "peft")
    assert outcome.same and outcome.adapters
    assert outcome.tensors == len(load_file(adapter / "adapter_model.safetensors"))
    assert convert(base, tmp_path / "merged", adapter_path=adapter, merge=True).target == "hf"
    assert not verify(base, tmp_path / "merged").same


def test_a_plan_has_the_sizes_that_are_written(tiny, tmp_path: Path) -> None:
    planned = plan(tiny("llama"), tmp_path / "mca", layout=LAYOUT)
    assert planned.is_possible and not (tmp_path / "mca").exists()
    done = convert(tiny("llama"), tmp_path / "mca", layout=LAYOUT)
    assert planned.written_bytes == done.nbytes and len(planned.stages) == 2
    folder = tmp_path / "mca/iter_0000001"
    assert planned.files == {
        str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*.safetensors")
    }
    impossible = plan(tiny("llama"), tmp_path / "mca", layout=ParallelLayout(tensor_model_parallel_size=7))
    assert not impossible.is_possible and len(impossible.refusals) > 1


def test_progress_is_told_from_the_first_byte_to_the_last_and_may_stop_the_work(tiny, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    result = convert(tiny("llama"), tmp_path / "a", progress=lambda *call: calls.append(call))
    assert calls[0] == (0, result.nbytes) and calls[-1] == (result.nbytes, result.nbytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)

    def stop(done: int, total: int) -> None:
        if done == total:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        convert(tiny("llama"), tmp_path / "b", progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_cast_and_its_values(tiny, tmp_path: Path) -> None:
    convert(tiny("llama"), tmp_path / "hf", to="hf", dtype="bf16")
    assert set(inspect(tmp_path / "hf").dtypes) == {"BF16"}
    assert verify(tiny("llama"), tmp_path / "hf").problems
    assert verify(tiny("llama"), tmp_path / "hf", tolerance=0.1).same


def test_a_path_in_the_working_directory_is_not_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    missing = f"{tmp_path}/runs/step100: no such directory"
    for call in (lambda path: convert(path, "out"), inspect):
        with pytest.raises(McaError, match=missing):
            call("./runs/step100")
    assert missing in plan("./runs/step100").refusals[0]


def test_fp64_is_compared_in_fp64() -> None:
    values = np.array([1.0, 1.0 + 1e-10])
    assert list(_different(values[:1], values[1:], tolerance=1e-11)) == [0]


MISTAKES = {
    "no such directory": lambda hf, out: convert(out / "none", out / "x"),
    "to: expected mca, hf or None, not 'megatron'": lambda hf, out: convert(hf, out / "x", to="megatron"),
    "dtype: expected one of bf16, fp16, fp32 or None, not 'int8'": lambda hf, out: convert(
        hf, out / "x", dtype="int8"
    ),
    "workers: expected a whole number of at least 1, not 0": lambda hf, out: convert(
        hf, out / "x", workers=0
    ),
    "max_shard_size: expected a whole number": lambda hf, out: plan(hf, max_shard_size="5GB"),
    "tolerance: expected a finite number of at least 0, not -1.0": lambda hf, out: verify(
        hf, hf, tolerance=-1.0
    ),
    "tolerance: expected a finite number of at least 0, not inf": lambda hf, out: verify(
        hf, hf, tolerance=float("inf")
    ),
    "top: expected a whole number": lambda hf, out: inspect(hf, top=0),
    "--merge needs --adapter_path": lambda hf, out: convert(hf, out / "x", merge=True),
    "missing --checkpoint_path": lambda hf, out: convert(None, out / "x"),
    "--fp8 is for Hugging Face targets": lambda hf, out: convert(hf, out / "x", fp8=True),
    "--max_shard_size is for Hugging Face models": lambda hf, out: convert(hf, out / "x", max_shard_size=9),
    "layout is only for MCA targets": lambda hf, out: convert(hf, out / "x", to="hf", layout=LAYOUT),
    "contains the source": lambda hf, out: convert(hf, hf.parent, overwrite=True),
    "exists and is not empty": lambda hf, out: convert(hf, out),
}


def test_limits_that_have_no_effect_on_an_adapter_are_warned_about(tiny, tmp_path: Path, caplog) -> None:
    adapter = random_adapter(tiny("llama"), tmp_path / "adapter")
    convert(tiny("llama"), tmp_path / "a", adapter_path=adapter)
    assert verify(adapter, adapter).same and not caplog.messages
    convert(tiny("llama"), tmp_path / "b", adapter_path=adapter, workers=2)
    verify(adapter, adapter, workers=2, memory_limit=10**9)
    assert [message.partition(";")[0] for message in caplog.messages] == [
        "--workers has no effect on an adapter",
        "--workers and --memory_limit have no effect on an adapter",
    ]


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_one_line_of_an_mca_error(message: str, tiny, tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    with pytest.raises(McaError) as caught:
        MISTAKES[message](tiny("llama"), tmp_path)
    if message != "contains the source":
        assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["something"]


def test_what_the_system_refuses_is_an_mca_error(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "some/file")

    monkeypatch.setattr("mca_convert.conversion.side_files", refuse)
    with pytest.raises(McaError, match="some/file: Permission denied"):
        convert(tiny("llama"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, mca_convert; assert not {'numpy', 'torch', 'mca_models'} & sys.modules.keys(); "
    code += "mca_convert.convert; assert not {'numpy', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert mca_convert.__all__ == sorted(mca_convert.__all__)
    assert all(getattr(mca_convert, name) is not None for name in mca_convert.__all__)
    assert not hasattr(mca_convert, "nothing")
