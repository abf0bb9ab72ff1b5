"""``mca-convert plan``: published models in seconds, all reasons at once, memory as predicted."""

import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from files import layout_flags as flags

from mca_config.errors import McaError
from mca_convert.cli import main
from mca_convert.forecast import ConversionPlan, _Forecast, plan_stages

CONFIGS = Path(__file__).parents[2] / "mca-models/tests/data/configs"
# published model -> a layout that people train it in
LAYOUTS: dict[str, dict[str, int | str]] = {
    "llama-3.1-405b": {"tp": 8, "pp": 16, "first": 7, "last": 7},
    "qwen3-235b-a22b": {"tp": 4, "pp": 8, "ep": 32, "etp": 1, "first": 11, "last": 11},
    "mixtral-8x22b": {"tp": 2, "pp": 8, "vpp": 7, "ep": 8, "etp": 1},
    "deepseek-v3": {"tp": 8, "pp": 16, "ep": 32, "etp": 1, "first": 4, "last": 1},
    "glm-4.5": {"tp": 8, "pp": 8, "ep": 16, "etp": 1, "string": "Et*11|(t*12|)*6t*9mL"},
    "gpt-oss-120b": {"tp": 8, "pp": 4, "ep": 8, "etp": 1},
    "qwen3-next-80b-a3b": {"tp": 2, "pp": 4, "ep": 8, "etp": 1},
}


@pytest.mark.cases(0, always=["mixtral-8x22b"])
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_published_models_are_planned_in_seconds(name: str, tmp_path: Path, capsys) -> None:
    from mca_models.templates import config_from_hf, get_family

    hf = json.loads((CONFIGS / f"{name}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(hf))
    started = time.process_time()
    code = main(["plan", "--json", "--checkpoint_path", str(tmp_path), *flags(LAYOUTS[name])])
    seconds = time.process_time() - started
    plan = json.loads(capsys.readouterr().out)
    assert code == 0 and plan["refusals"] == [] and plan["config_only"]
    config = config_from_hf({key: value for key, value in hf.items() if key != "quantization_config"})
    assert plan["tensors"] == len(get_family(config.model_type).hf_shapes(config))
    assert bool(config.mtp_num_layers) == (name in ("deepseek-v3", "glm-4.5"))
    if "quantization_config" in hf:
        assert plan["read_bytes"] == quantised_bytes(hf)
    else:
        assert 0.999 < plan["read_bytes"] / plan["written_bytes"] < 1.001
    assert 2 * plan["parameters"] <= plan["written_bytes"] < 2.002 * plan["parameters"]
    assert seconds < 30  # ten times what the longest needs


def quantised_bytes(hf: dict) -> int:
    """Return the size of the files, summed over the modules that transformers builds of one layer of each kind."""
    import torch
    import transformers

    dense, method = hf.get("first_k_dense_replace", 0), hf["quantization_config"]["quant_method"]
    short = {key: value for key, value in hf.items() if key != "quantization_config"}
    short |= {"num_hidden_layers": dense + 1, "layer_types": hf.get("layer_types", [None])[: dense + 1]}
    predicting, hidden = hf.get("num_nextn_predict_layers", 0), hf["hidden_size"]
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**{k: v for k, v in short.items() if v != [None]})
        model = transformers.AutoModelForCausalLM.from_config(config)
    repeated = f".layers.{dense}.", hf["num_hidden_layers"] - dense + predicting
    total = predicting * 2 * (2 * hidden * hidden + 3 * hidden)  # eh_proj, and norms of its inputs and output
    for name, tensor in model.state_dict().items():
        copies = repeated[1] if repeated[0] in name else 1
        total += copies * stored_bytes(name, tensor.shape, method)
    return total


def stored_bytes(name: str, shape: tuple[int, ...], method: str) -> int:
    elements = math.prod(shape)
    is_linear = len(shape) >= 2 and ".layers." in name and not name.endswith("mlp.gate.weight")
    if method == "fp8" and is_linear:
        blocks = math.prod(shape[:-2]) * math.ceil(shape[-2] / 128) * math.ceil(shape[-1] / 128)
        return elements + 4 * blocks
    if method == "mxfp4" and len(shape) == 3:
        return elements // 2 + elements // 32
    return (4 if name.endswith("e_score_correction_bias") else 2) * elements


PUBLISHED = json.loads((CONFIGS.parent / "published.json").read_text())
UNCUT = ("gemma-4-e2b", "gemma-4-e4b")
"""All layers stand on one pipeline stage, which makes the embeddings of each."""


@pytest.mark.qualify
@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_every_written_down_configuration_is_planned(name: str, tmp_path: Path, capsys) -> None:
    """Each on two pipeline stages, with the size that is published."""
    from mca_models.templates import config_from_hf, get_family

    known = PUBLISHED[name]
    config = config_from_hf(known["config"])
    (tmp_path / "config.json").write_text(json.dumps(known["config"]))
    layout: dict[str, int | str] = {} if name in UNCUT else {"pp": 2, "first": (config.num_layers + 1) // 2}
    plan = planned(capsys, "--checkpoint_path", str(tmp_path), "--to", "mca", *flags(layout))
    assert plan["refusals"] == [] and len(plan["stages"]) == layout.get("pp", 1)
    shapes = get_family(config.model_type).hf_shapes(config)
    assert (plan["tensors"], plan["parameters"]) == (len(shapes), sum(map(math.prod, shapes.values())))
    if "found" in known:  # what the MTP layers are made of is seen in the names of tensors alone
        assert plan["parameters"] < known["parameters"]
    elif "parameters" in known:
        assert plan["parameters"] == known["parameters"]
    else:
        assert plan["parameters"] / 1e9 == pytest.approx(known["billions"], rel=0.002)


def test_every_published_model_has_a_layout() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(LAYOUTS)


def planned(capsys, *arguments: str) -> dict:
    capsys.readouterr()
    code = main(["plan", "--json", *arguments])
    plan = json.loads(capsys.readouterr().out)
    assert code == bool(plan["refusals"])
    return plan


def test_what_is_planned_is_what_is_written(tiny, convert, capsys, tmp_path: Path) -> None:
    source = tiny("qwen3_moe", "bfloat16")
    layout = {"tp": 2, "pp": 2, "ep": 2}
    plan = planned(
        capsys, "--checkpoint_path", str(source), "--output_path", str(tmp_path / "mca"), *flags(layout)
    )
    assert not (tmp_path / "mca").exists() and not list(tmp_path.iterdir())
    mca = convert(source, "mca", **layout)
    written = {str(f.relative_to(mca / "iter_0000001")): f.stat().st_size for f in mca.rglob("*.safetensors")}
    assert plan["files"] == written
    assert plan["read_bytes"] == sum(info.nbytes for info in _tensors(source))
    assert [stage["holds"] for stage in plan["stages"]] == ["embedding, layers 0-1", "layers 2-3, loss"]
    back = planned(capsys, "--checkpoint_path", str(mca), "--fp32")
    assert back["target"] == "hf" and list(back["files"]) == ["model.safetensors"]
    assert back["written_bytes"] == 2 * plan["read_bytes"]


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_a_configuration_alone_promises_what_the_quantised_files_hold(
    method: str, tiny, capsys, tmp_path: Path
) -> None:
    import tiny_hf
    from quantise import fp8_copy, mxfp4_copy

    if method == "fp8":
        fp8_copy(tiny("qwen3_moe", "bfloat16"), tmp_path / "full")
    else:
        source = tiny_hf.save("gpt_oss", tmp_path / "source", "bfloat16", intermediate_size=64)
        mxfp4_copy(source, tmp_path / "full")
    (tmp_path / "config").mkdir()
    shutil.copy(tmp_path / "full/config.json", tmp_path / "config")
    promised, found = (
        planned(capsys, "--checkpoint_path", str(tmp_path / name), "--fp32") for name in ("config", "full")
    )
    for key in ("tensors", "parameters", "read_bytes", "written_bytes", "files", "stages"):
        assert promised[key] == found[key], key
    assert found["read_bytes"] == sum(f.stat().st_size for f in (tmp_path / "full").glob("*.safetensors")) - (
        _header_bytes(tmp_path / "full/model.safetensors")
    )
    (tmp_path / "config/config.json").write_text(
        (tmp_path / "full/config.json").read_text().replace(f'"{method}"', '"awq"')
    )
    refused = planned(capsys, "--checkpoint_path", str(tmp_path / "config"))
    assert "config/config.json: quant_method 'awq' cannot be read" in refused["refusals"][0]


def _header_bytes(file: Path) -> int:
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


def _tensors(path: Path) -> list:
    from mca_models.checkpoint_kinds import open_checkpoint

    return list(open_checkpoint(path).tensors())


def test_the_table_is_for_people(tiny, capsys) -> None:
    layout = flags({"tp": 2, "pp": 2, "ep": 2})
    assert main(["plan", "--checkpoint_path", str(tiny("qwen3_moe")), *layout]) == 0
    out = capsys.readouterr().out
    assert "pipeline rank  holds" in out and "embedding, layers 0-1" in out
    assert "nothing was written" in out


def test_all_reasons_are_reported_together(tiny, capsys, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/x").touch()
    plan = planned(
        capsys,
        "--checkpoint_path",
        str(tiny("qwen3_moe")),
        "--output_path",
        str(tmp_path / "taken"),
        *flags({"tp": 3, "pp": 3, "ep": 3, "etp": 7}),
    )
    reported = "\n".join(plan["refusals"])
    assert "exists and is not empty" in reported
    assert "num_layers 4 cannot be divided" in reported
    assert "num_moe_experts 4 cannot be divided by expert_model_parallel_size 3" in reported
    assert "num_attention_heads 4 cannot be divided by tensor_model_parallel_size 3" in reported
    assert "cannot be divided by expert_tensor_parallel_size 7" in reported
    assert len(plan["refusals"]) < 12  # alike parameters once


def test_a_damaged_source_and_a_bad_layout_are_both_reported(tiny, capsys, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes((tiny("llama") / "config.json").read_bytes())
    (source / "model.safetensors").write_bytes(b"1234")
    plan = planned(capsys, "--checkpoint_path", str(source), "--tensor_model_parallel_size", "3")
    assert "too few for a safetensors file" in plan["refusals"][0]
    assert any("change tensor_model_parallel_size, for example to 2" in reason for reason in plan["refusals"])


def test_a_full_disk_is_foreseen(tiny, capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    plan = planned(capsys, "--checkpoint_path", str(tiny("llama")), "--output_path", str(tmp_path / "a/b"))
    assert len(plan["refusals"]) == 1 and "free space" in plan["refusals"][0]


@pytest.mark.parametrize("options", [["--to", "mca"], ["--to", "hf", "--max_shard_size", "40K"]])
def test_the_space_that_is_needed_is_that_of_all_files(
    options: list[str], tiny, convert, capsys, tmp_path: Path, monkeypatch
) -> None:
    written = convert(tiny("llama"), "out", *options)
    sizes = [file.stat().st_size for file in written.rglob("*") if file.is_file()]
    needed = sum(-(-size // 4096) for size in [*sizes, 1]) * 4096  # and the marker of the folder
    words = ("--checkpoint_path", str(tiny("llama")), "--output_path", str(tmp_path / "more"), *options)
    for free in (needed - 1, needed):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        assert len(planned(capsys, *words)["refusals"]) == (free < needed)


def test_layout_flags_for_hugging_face_are_refused(tiny, convert, capsys) -> None:
    mca = convert(tiny("llama"), "mca")
    assert main(["plan", "--checkpoint_path", str(mca), "--tensor_model_parallel_size", "2"]) == 2
    assert "add --to mca" in capsys.readouterr().err


def test_peak_memory_is_as_predicted(tmp_path: Path) -> None:
    """Anonymous memory, of buffers large enough to count and of a cast."""
    source = _large(tmp_path / "source")
    options = ["--checkpoint_path", str(source), "--workers", "3", "--memory_limit", "48M", "--fp32"]
    layout = flags({"tp": 2, "pp": 2})
    command = [sys.executable, "-m", "mca_convert"]
    plan = subprocess.run(
        [*command, "plan", "--json", *options, *layout], check=True, capture_output=True, text=True
    )
    predicted = json.loads(plan.stdout)["peak_bytes"]
    measured = 0
    for attempt in range(5):  # where this process did not see the moment of most memory, being asleep
        arguments = [*command, *options, *layout, "--output_path", str(tmp_path / f"mca{attempt}")]
        with subprocess.Popen(arguments, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None:
                measured = max(measured, _anonymous(process.pid))
                time.sleep(0.002)
        assert process.returncode == 0
        if measured >= 0.8 * predicted:
            break
    assert abs(measured - predicted) < 0.2 * predicted, (measured / 2**20, predicted / 2**20)


def _anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")), 0)


def _large(directory: Path) -> Path:
    """A Llama of 170 MB, all zeros."""
    from mca_models.checkpoint.hf_directory import ConfigOnlySource
    from mca_models.checkpoint.hf_writer import METADATA
    from mca_models.storage.safetensors import plan_file
    from mca_models.storage.writer import SafetensorsWriter

    directory.mkdir()
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 6144,
        "num_hidden_layers": 4,
        "vocab_size": 512,
        "max_position_embeddings": 64,
    }
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_act": "silu"}
    config = {"model_type": "llama", **sizes, **heads, "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    infos = ConfigOnlySource(directory).tensors()
    specs = [(info.name, info.dtype, info.shape) for info in infos]
    with SafetensorsWriter(plan_file(directory / "model.safetensors", specs, METADATA)) as writer:
        for info in infos:
            writer.write(info.name, bytes(info.nbytes))
    return directory


def test_the_stages_of_a_dense_model_have_no_expert_files() -> None:
    config: Any = SimpleNamespace(
        layout=SimpleNamespace(pp=1),
        pipeline_plan=lambda: SimpleNamespace(chunks=[[]], rank_layers=lambda rank: ()),
    )
    file = "pp_000/tp_00.safetensors"
    (stage,) = plan_stages(SimpleNamespace(config=config, files={file: []}), {file: 7})  # type: ignore[arg-type]
    assert (stage.dense_bytes, stage.expert_bytes) == (7, 0)


def test_steps_that_fail_alike_are_reported_once() -> None:
    def fail(message: str) -> None:
        raise McaError(message)

    request: Any = None
    made = _Forecast(request, ConversionPlan(source="model", target="mca"))
    results = [made.attempt(lambda message=message: fail(message)) for message in ("a", "b", "a")]
    assert results == [None] * 3 and made.plan.refusals == ["a", "b"]
    assert made.attempt(lambda: 5) == 5


def test_an_error_of_the_system_is_reported_with_its_file_if_it_names_one() -> None:
    def fail(*arguments: object) -> None:
        raise OSError(*arguments)

    request: Any = None
    made = _Forecast(request, ConversionPlan(source="model", target="mca"))
    made.attempt(lambda: fail(5, "Input/output error", "a.bin"))
    made.attempt(lambda: fail(5, "Input/output error"))
    made.attempt(lambda: fail("no address"))
    assert made.plan.refusals == ["a.bin: Input/output error", "Input/output error", "no address"]
