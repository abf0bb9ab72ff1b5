"""LoRA adapters through the command: PEFT to MCA and back, other layouts, merging."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from files import tree
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from mca_config.errors import McaError
from mca_convert import forecast
from mca_convert.cli import main
from mca_convert.pool import Limits
from mca_models.checkpoint_kinds import open_checkpoint
from mca_models.lora import adapter_for, merge

DENSE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "qwen2": {
        "target_modules": DENSE,
        "modules_to_save": ["lm_head"],
        "rank_pattern": {"k_proj": 5},
        "use_rslora": True,
    },
    "qwen3_moe": {
        "target_modules": DENSE[:4],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}


@pytest.fixture(scope="module", params=sorted(CASES))
def saved(request, tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base, adapter = tiny(request.param), tmp_path_factory.mktemp("saved")
    config = peft.LoraConfig(r=3, lora_alpha=8, init_lora_weights=False, **CASES[request.param])
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(adapter)
    return base, adapter


@pytest.fixture
def pair(saved: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """A base model and a copy of an adapter, none of whose tensors is zero."""
    base, adapter = saved
    return base, shutil.copytree(adapter, tmp_path / "adapter")


def run(*arguments: object) -> None:
    assert main([str(argument) for argument in arguments]) == 0


def same(first: Path, second: Path) -> None:
    ours, theirs = (load_file(path / "adapter_model.safetensors") for path in (first, second))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_to_mca_and_back(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    layout = ["--tensor_model_parallel_size=2", "--pipeline_model_parallel_size=2"]
    mca, other, back = (tmp_path / name for name in ("mca", "other", "back"))
    run("--checkpoint_path", base, "--adapter_path", adapter, "--output_path", mca, *layout)
    run("--adapter_path", mca, "--output_path", other, "--to", "mca", "--tensor_model_parallel_size=1")
    for number, source in enumerate((mca, other)):
        run("--adapter_path", source, "--output_path", f"{back}{number}")
        same(adapter, Path(f"{back}{number}"))
    run("inspect", mca)


def test_merging_is_what_peft_computes(pair: tuple[Path, Path], convert, tmp_path: Path) -> None:
    base, adapter = pair
    mca = convert(base, "base", tp=2, pp=2)
    for number, source in enumerate((base, mca)):
        target = tmp_path / f"merged{number}"
        run("--checkpoint_path", source, "--adapter_path", adapter, "--merge", "--output_path", target)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    expected = theirs.merge_and_unload().state_dict()
    for number in range(2):
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / f"merged{number}").state_dict()
        assert merged.keys() == expected.keys()
        for name, tensor in merged.items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-6)
    run(
        *("--checkpoint_path", base, "--adapter_path", adapter, "--merge", "--bf16"),
        *("--output_path", tmp_path / "bf16"),
    )
    for name, tensor in load_file(tmp_path / "bf16/model.safetensors").items():
        merged = load_file(tmp_path / "merged0/model.safetensors")[name]
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, merged.bfloat16())


def test_merging_goes_to_mca_too_and_through_any_memory(
    pair: tuple[Path, Path], convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = pair
    arguments = ["--checkpoint_path", base, "--adapter_path", adapter, "--merge", "--output_path"]
    run(*arguments, tmp_path / "hf")
    run(*arguments, tmp_path / "mca", "--to", "mca", "--tensor_model_parallel_size=2")
    monkeypatch.setattr(Limits, "computed_bytes", 333)  # these tensors fit in the smallest buffers
    run(*arguments, tmp_path / "narrow", "--memory_limit=576KiB", "--workers=3", "--max_shard_size=20K")
    run("verify", tmp_path / "hf", tmp_path / "narrow")
    assert tree(tmp_path / "mca") == tree(convert(tmp_path / "hf", "two_steps", tp=2))
    assert main(["verify", str(base), str(tmp_path / "hf")]) == 1


@pytest.mark.cases(0, always=["qwen3_moe"])
def test_blocks_of_a_few_rows_are_merged_as_whole_weights(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = pair
    arguments = ["--checkpoint_path", base, "--adapter_path", adapter, "--merge", "--output_path"]
    run(*arguments, tmp_path / "whole")
    monkeypatch.setattr(merge, "_BLOCK", 200)
    run(*arguments, tmp_path / "blocks")
    assert tree(tmp_path / "blocks") == tree(tmp_path / "whole")


@pytest.mark.cases(0, always=["qwen2"])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_an_adapter_that_holds_a_head_is_merged_into_a_language_model(
    kind, tiny, convert, tmp_path: Path, capsys
) -> None:
    """The merged model is the one with the head: PEFT's and ours, into either format, from either."""
    base, adapter = tiny(kind), tmp_path / "adapter"
    config = peft.LoraConfig(r=3, init_lora_weights=False, task_type="SEQ_CLS", target_modules=["q_proj"])
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    model = peft.get_peft_model(model, config)
    model.save_pretrained(adapter)
    mca = convert(base, "base", tp=2, pp=2)
    run("--checkpoint_path", base, "--adapter_path", adapter, "--output_path", tmp_path / "own")
    for path in (adapter, tmp_path / "own"):
        with pytest.raises(
            McaError, match="head for sequence_classification; open the base model with head=Head"
        ):
            adapter_for(path, open_checkpoint(base).config)
    described = tmp_path / "own" / "mca_config.json"
    described.write_text(described.read_text().replace('"LABEL_', '"name_'))
    for number, (source, of) in enumerate([(base, adapter), (mca, adapter), (base, tmp_path / "own")]):
        arguments = ("--checkpoint_path", source, "--adapter_path", of, "--merge", "--output_path")
        run("plan", *arguments[:5])
        run(*arguments, tmp_path / f"merged{number}")
        run(*arguments, tmp_path / f"mca{number}", "--to", "mca", "--tensor_model_parallel_size=2")
        run("--checkpoint_path", tmp_path / f"mca{number}", "--output_path", tmp_path / f"back{number}")
    expected = model.merge_and_unload().state_dict()
    for number in range(3):
        for name in ("merged", "back"):
            path = tmp_path / f"{name}{number}"
            merged = AutoModelForSequenceClassification.from_pretrained(path)
            assert [*merged.config.id2label.values()] == [
                f"{'name' if number == 2 else 'LABEL'}_{label}" for label in range(3)
            ]
            assert merged.state_dict().keys() == expected.keys()
            for key, tensor in merged.state_dict().items():
                torch.testing.assert_close(tensor, expected[key], atol=1e-6, rtol=1e-6)


def test_an_fp64_base_is_merged_in_fp64(tiny, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = tmp_path / "base"
    shutil.copytree(tiny("llama"), base)
    weights = load_file(base / "model.safetensors")
    weights = {
        name: w.double() + torch.rand(w.shape, dtype=torch.float64) * 1e-9 for name, w in weights.items()
    }
    sibling = "model.layers.0.self_attn.k_proj.weight"
    weights[sibling][0, 0] = 1 + 2**-8 + 2**-30  # in fp32 halfway between two numbers of bf16
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    config = peft.LoraConfig(
        r=3, init_lora_weights=False, target_modules=["q_proj"], modules_to_save=["lm_head"]
    )
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    model.save_pretrained(tmp_path / "adapter")
    run(
        *("--checkpoint_path", base, "--adapter_path", tmp_path / "adapter", "--merge"),
        *("--output_path", tmp_path / "out"),
    )
    expected = model.merge_and_unload().state_dict()
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert tensor.dtype == torch.float64
        torch.testing.assert_close(tensor, expected[name], atol=1e-14, rtol=1e-14)  # sums of 3 products
    run(
        *("--checkpoint_path", base, "--adapter_path", tmp_path / "adapter", "--merge", "--bf16"),
        *("--output_path", tmp_path / "bf16"),
    )
    assert load_file(tmp_path / "bf16" / "model.safetensors")[sibling][0, 0] == 1 + 2**-7


def planned(capsys, *arguments: object) -> dict:
    capsys.readouterr()
    code = main(["plan", "--json", *map(str, arguments)])
    plan = json.loads(capsys.readouterr().out)
    assert code == bool(plan["refusals"])
    return plan


def weight_files(path: Path) -> dict[str, int]:
    folder = path / "iter_0000001" if (path / "iter_0000001").exists() else path
    return {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*.safetensors")}


@pytest.mark.cases(0, always=["qwen3_moe"])
def test_plan_says_what_is_written(pair: tuple[Path, Path], tmp_path: Path, capsys) -> None:
    base, adapter = pair
    mca, layout = tmp_path / "mca", ["--tensor_model_parallel_size=2", "--pipeline_model_parallel_size=2"]
    arguments = ["--checkpoint_path", base, "--adapter_path", adapter]
    plan = planned(capsys, *arguments, "--output_path", mca, *layout)
    assert plan["kind"] == "PEFT LoRA adapter" and plan["layout"] == "tp 2 pp 2" and not mca.exists()
    assert plan["tensors"] == len(load_file(adapter / "adapter_model.safetensors"))
    run(*arguments, "--output_path", mca, *layout)
    assert plan["files"] == weight_files(mca) and len(plan["stages"]) == 2
    back = planned(capsys, "--adapter_path", mca, "--bf16", "--output_path", tmp_path / "back")
    run("--adapter_path", mca, "--bf16", "--output_path", tmp_path / "back")
    assert back["target"] == "hf" and back["files"] == weight_files(tmp_path / "back")
    for to in ([], ["--to", "mca", *layout]):
        target = tmp_path / f"merged{len(to)}"
        merged = planned(capsys, *arguments, "--merge", "--output_path", target, *to)
        run(*arguments, "--merge", "--output_path", target, *to)
        assert merged["files"] == weight_files(target)
    wrong = planned(capsys, *arguments, "--output_path", mca, "--pipeline_model_parallel_size=3")
    assert "exists and is not empty" in wrong["refusals"][0]
    assert any("num_layers 4 cannot be divided" in reason for reason in wrong["refusals"])
    refused = planned(capsys, "--adapter_path", adapter)["refusals"]
    assert len(refused) == 1 and "does not describe its base model" in refused[0]
    assert "no adapter_config.json is there" in planned(capsys, "--adapter_path", base)["refusals"][0]


@pytest.mark.cases(0, always=["qwen3_moe"])
def test_the_space_that_an_adapter_needs_is_that_of_all_files(
    pair: tuple[Path, Path], tmp_path: Path, capsys, monkeypatch
) -> None:
    base, adapter = pair
    for to in ("mca", "hf"):
        arguments, written = ["--checkpoint_path", base, "--adapter_path", adapter, "--to", to], tmp_path / to
        run(*arguments, "--output_path", written)
        sizes = [file.stat().st_size for file in written.rglob("*") if file.is_file()]
        needed = sum(-(-size // 4096) for size in [*sizes, 1]) * 4096  # and the marker of the folder
        for free in (needed - 1, needed):
            monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
            found = planned(capsys, *arguments, "--output_path", tmp_path / "more")["refusals"]
            assert len(found) == (free < needed), (to, found)


def test_casts_of_adapters_overflow_by_name(pair: tuple[Path, Path], tmp_path: Path, capsys) -> None:
    base, adapter = pair
    other = tmp_path / "other"
    shutil.copytree(adapter, other)
    tensors = load_file(other / "adapter_model.safetensors")
    name = sorted(tensors)[3]
    tensors[name][0, 1] = 70000.0
    save_file(tensors, other / "adapter_model.safetensors")
    arguments = ["--checkpoint_path", str(base), "--adapter_path", str(other), "--fp16", "--output_path"]
    assert main([*arguments, str(tmp_path / "out")]) == 1 and not (tmp_path / "out").exists()
    assert name in capsys.readouterr().err


def broken(folder: Path, file: str, part: str) -> str:
    """Makes two values of the first tensor whose name has ``part`` NaN; its name."""
    tensors = load_file(folder / file)
    name = next(name for name in sorted(tensors) if part in name)
    tensors[name][0, :2] = torch.nan
    save_file(tensors, folder / file, {"format": "pt"})
    return name


@pytest.mark.cases(0, always=["qwen2"])
def test_an_adapter_that_is_not_finite_is_copied_with_a_warning_and_not_cast(
    pair: tuple[Path, Path], tmp_path: Path, caplog, capsys
) -> None:
    base, adapter = pair
    name = broken(adapter, "adapter_model.safetensors", "lora_A")
    reported = f"1 tensor has values that are not finite (infinite or NaN): {name} (2 values)"
    words = "--checkpoint_path", base, "--adapter_path", adapter, "--output_path"
    run(*words, tmp_path / "mca")
    assert caplog.messages == [f"{adapter}: {reported}; they are copied as they are"]
    for folder in (adapter, tmp_path / "mca"):
        assert main(["inspect", str(folder), "--values"]) == 1
        assert f"{name}, 2 values" in capsys.readouterr().out
    assert main(["verify", str(adapter), str(tmp_path / "mca")]) == 0
    assert f"warning: in both, {reported}" in capsys.readouterr().out
    plan = ["plan", "--checkpoint_path", str(base), "--adapter_path", str(adapter)]
    assert main(plan) == 0 and f"note: {adapter}: {reported}" in capsys.readouterr().out
    assert main([*plan, "--bf16"]) == 1
    assert main([*map(str, words), str(tmp_path / "cast"), "--bf16"]) == 1
    assert f"{reported}; it cannot be cast" in capsys.readouterr().err
    assert main([*map(str, words), str(tmp_path / "merged"), "--merge"]) == 1
    assert f"the adapter's {reported}" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["q_proj.weight", "embed_tokens"])
def test_a_base_that_is_not_finite_is_not_merged_into(
    part: str, pair: tuple[Path, Path], tmp_path: Path, capsys
) -> None:
    shared, adapter = pair
    base = shutil.copytree(shared, tmp_path / "base")
    name = broken(base, "model.safetensors", part)
    words = ["--checkpoint_path", base, "--adapter_path", adapter, "--merge"]
    assert main([*map(str, words), "--output_path", str(tmp_path / "merged")]) == 1
    error = capsys.readouterr().err
    assert f"{base}/model.safetensors: {name}" in error and "2 values" in error
    assert main(["plan", *map(str, words), "--values"]) == 1
    assert f"{base}/model.safetensors: {name}" in capsys.readouterr().out


@pytest.mark.cases(0, always=["qwen2"])
def test_verify_compares_adapters(pair: tuple[Path, Path], tmp_path: Path, capsys) -> None:
    base, adapter = pair
    mca, half = tmp_path / "mca", tmp_path / "half"
    convert = ["--checkpoint_path", base, "--adapter_path", adapter, "--output_path"]
    run(*convert, mca, "--tensor_model_parallel_size=2")
    run(*convert, half, "--bf16", "--to", "hf")
    run("verify", adapter, mca)
    run("verify", mca, adapter)
    run("verify", adapter, half, "--tolerance=0.01")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    torch.save(load_file(adapter / "adapter_model.safetensors"), pickled / "adapter_model.bin")
    shutil.copy(adapter / "adapter_config.json", pickled)
    run("verify", adapter, pickled)
    capsys.readouterr()
    assert main(["verify", str(adapter), str(half)]) == 1
    assert "F32 and BF16 (--tolerance allows this)" in capsys.readouterr().out
    assert main(["verify", str(adapter), str(base)]) == 1
    assert f"{base} is a full model and {adapter} an adapter" in capsys.readouterr().err


def test_the_order_of_an_adapters_patterns_is_compared(
    pair: tuple[Path, Path], tmp_path: Path, capsys
) -> None:
    """The first pattern that matches counts, so another order is another scale."""
    path, patterns = pair[1] / "adapter_config.json", {"q_proj": 4, ".*_proj": 16}
    other = shutil.copytree(pair[1], tmp_path / "other")
    for folder, items in ((pair[1], patterns.items()), (other, reversed(patterns.items()))):
        document = json.loads(path.read_text()) | {"alpha_pattern": dict(items)}
        (folder / path.name).write_text(json.dumps(document))
    assert main(["verify", str(pair[1]), str(other)]) == 1
    assert "adapter_config.json, alpha_pattern: " in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["peft", "mca"])
def test_verify_tells_where_adapters_differ(
    kind: str, pair: tuple[Path, Path], tmp_path: Path, capsys
) -> None:
    base, adapter = pair
    other = tmp_path / "other"
    shutil.copytree(adapter, other)
    tensors = load_file(other / "adapter_model.safetensors")
    name = sorted(name for name in tensors if ".lora_A." in name)[-1]
    tensors[name][1, 2] += 1
    save_file(tensors, other / "adapter_model.safetensors")
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 9}))
    first = adapter
    if kind == "mca":
        first = tmp_path / "first"
        run("--checkpoint_path", base, "--adapter_path", adapter, "--output_path", first)
    assert main(["verify", str(first), str(other)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("different adapters") and "lora_alpha: 8 and 9" in out
    assert f"{name}: 1 elements differ, the first at [1, 2]" in out and "1 more" not in out
    del tensors[name]
    save_file(tensors, other / "adapter_model.safetensors")
    missing = main(["verify", str(first), str(other)]), capsys.readouterr()
    assert missing[0] == 1 and name in missing[1].out + missing[1].err


def test_merging_writes_the_base_models_tokenizer_and_names_files_that_differ(
    tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = shutil.copytree(tiny("llama"), tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(
        tmp_path / "adapter"
    )
    for folder, template in ((base, "plain"), (tmp_path / "adapter", "plain")):
        (folder / "tokenizer_config.json").write_text('{"model_max_length": 9}')
        (folder / "chat_template.jinja").write_text(template)
    merge = ["--checkpoint_path", base, "--adapter_path", tmp_path / "adapter", "--merge", "--output_path"]
    loaded = '{"is_local": true, "local_files_only": false, "model_max_length": 9}'
    (tmp_path / "adapter" / "tokenizer_config.json").write_text(loaded)
    run(*merge, tmp_path / "same")
    assert not caplog.messages, "transformers notes how it loaded a tokenizer"
    (tmp_path / "adapter" / "chat_template.jinja").write_text("of chats")
    run(*merge, tmp_path / "other")
    (reported,) = caplog.messages
    own = tmp_path / "adapter"
    rest = f"those of {own} that differ (chat_template.jinja) are not used"
    assert reported == f"tokenizer files are copied from the base model; {rest}"
    assert caplog.records[-1].levelname == "INFO"
    assert (tmp_path / "other" / "chat_template.jinja").read_text() == "plain"


def test_a_damaged_base_is_not_merged_into(tiny, convert, tmp_path: Path, capsys) -> None:
    base = tiny("llama")
    config = peft.LoraConfig(target_modules=["q_proj"])
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "a")
    mca = convert(base, "mca")
    file = mca / "iter_0000001/pp_000/tp_00.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    arguments = ["--checkpoint_path", mca, "--adapter_path", tmp_path / "a", "--merge", "--output_path"]
    assert main([*map(str, arguments), str(tmp_path / "out")]) == 1
    assert "its checksum is" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_no_adapter(tiny, tmp_path: Path, capsys) -> None:
    arguments = ["--checkpoint_path", tiny("llama"), "--adapter_path", tiny("llama"), "--output_path"]
    assert main([*map(str, arguments), str(tmp_path / "out")]) == 1
    assert "no adapter_config.json is there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--merge"], "--merge needs --adapter_path"),
        (["plan", "--merge"], "--merge needs --adapter_path"),
        (["plan"], "missing --checkpoint_path"),
        (
            ["plan", "--adapter_path", "{adapter}", "--merge"],
            "--merge needs the base model: --checkpoint_path",
        ),
        (["--adapter_path", "{adapter}", "--merge"], "--merge needs the base model: --checkpoint_path"),
        (["--adapter_path", "{adapter}", "--fp8"], "--fp8 is for full models; add --merge"),
        (["plan", "--adapter_path", "{adapter}", "--fp8"], "--fp8 is for full models; add --merge"),
        (["--checkpoint_path", ""], "--checkpoint_path: expected a path, not an empty value"),
        (["plan", "--adapter_path="], "--adapter_path: expected a path, not an empty value"),
    ],
)
def test_usage(arguments: list[str], message: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    filled = [argument.format(adapter=tmp_path / "adapter") for argument in arguments]
    assert main([*filled, "--output_path", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


def test_an_adapter_is_in_memory_as_read_and_as_written(
    pair: tuple[Path, Path], tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = pair
    monkeypatch.setattr(forecast, "_anonymous_bytes", lambda: 1 << 20)
    words = ("--checkpoint_path", base, "--adapter_path", adapter, "--output_path", tmp_path / "mca")
    plan = planned(capsys, *words, "--tensor_model_parallel_size=2")
    assert plan["peak_bytes"] == (1 << 20) + plan["written_bytes"] > 1 << 20
