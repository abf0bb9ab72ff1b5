"""Families with a vision model: all of it goes both ways, with what a processor needs beside it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_vision
import torch
from files import LAYOUT, assert_same_tensors, bits, hf_tensors
from quantise import fp8_copy
from safetensors.torch import load_file, save_file

from mca_config.checks import check_layout
from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_convert.cli import main
from mca_models.templates import get_family

CASES = sorted(tiny_vision.CASES)
LAYOUTS = ({"tp": 2, "pp": 2, "vpp": 2}, {"pp": 4}, {"tp": 4}, {"tp": 2, "pp": 3, "first": 2})
MOE = ({"ep": 2, "pp": 2}, {"tp": 2, "ep": 2, "etp": 1}, {"tp": 2, "pp": 2, "vpp": 2, "ep": 4, "etp": 2})
PROCESSOR = (
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("chat_template.json", "chat_template.jinja"),
)
CONFIGS = Path(__file__).parents[2] / "mca-models/tests/data/vision_configs"

PLANNED = sorted(path.stem for path in CONFIGS.glob("*.json"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Path] = {}

    def get(case: str) -> Path:
        if case not in made:
            made[case] = tiny_vision.save(case, tmp_path_factory.mktemp(case), "bfloat16")
            for name in PROCESSOR:
                (made[case] / name).write_text(json.dumps({"of": name}))
        return made[case]

    return get


def sizes(layout: dict) -> ParallelLayout:
    return ParallelLayout(**{LAYOUT[key]: size for key, size in layout.items()})


@pytest.mark.cases(
    0, always=["gemma3-two", "glm4v-two", "mistral3-two", "mistral3-mistral4-moe-two", "qwen3_5-two"]
)
@pytest.mark.parametrize("count", [2, len(LAYOUTS + MOE)], ids=["two", "every"])
@pytest.mark.parametrize("case", CASES)
def test_everything_goes_both_ways_on_every_layout(case: str, count: int, saved, convert) -> None:
    source = saved(case)
    hf = json.loads((source / "config.json").read_text())
    sparse = any("experts" in name for name in hf_tensors(source))
    config = McaModelConfig.load(convert(source, "any"))
    layouts = [each for each in LAYOUTS + (MOE if sparse else ()) if not check_layout(config, sizes(each))]
    before: Path | None = None
    for number, layout in enumerate(layouts[-count:]):
        mca = convert(before or source, f"mca{number}", *(["--to=mca"] if before else []), **layout)
        back = convert(mca, f"hf{number}")
        assert_same_tensors(source, back)
        assert json.loads((back / "config.json").read_text()) == hf
        assert all((back / name).read_text() == (source / name).read_text() for name in PROCESSOR)
        assert main(["verify", str(source), str(mca)]) == 0
        before = mca if not {"first", "vpp"} & layout.keys() else None


def test_a_checkpoint_of_any_spelling_is_the_same_model(saved, convert, tmp_path: Path) -> None:
    source = saved("gemma3")
    config = McaModelConfig.load(convert(source, "mca"))
    family = get_family("gemma3")
    tensors = load_file(source / "model.safetensors")
    for which in range(len(family.vision.spellings)):
        spelled = replace(config, extra={**config.extra, "hf_spelling": which})
        names = zip(family.params(config), family.params(spelled), strict=True)
        pairs = {own: its for a, b in names for own, its in zip(a.hf_names(), b.hf_names(), strict=True)}
        other = tmp_path / f"spelled{which}"
        shutil.copytree(source, other)
        save_file(
            {pairs[name]: x for name, x in tensors.items()}, other / "model.safetensors", {"format": "pt"}
        )
        back = convert(convert(other, f"mca{which}", tp=2), f"hf{which}")
        assert_same_tensors(other, back)
        assert main(["verify", str(source), str(back)]) == 0


def test_a_vision_model_that_computes_otherwise_is_another_model(saved, tmp_path: Path, capsys) -> None:
    source, other = saved("qwen2_vl"), tmp_path / "other"
    shutil.copytree(source, other)
    hf = json.loads((source / "config.json").read_text())
    reported = {
        "dtype": "float32",
        "initializer_range": 0.5,
        "of_tomorrow": None,
    }  # no features depend on these
    for changed, seen in (
        ({}, 0),
        ({"image_token_id": hf["image_token_id"] + 1}, 1),
        ({"vision_config": {**hf["vision_config"], "num_heads": 4}}, 1),
        ({"vision_config": {**hf["vision_config"], **reported}}, 0),
    ):
        (other / "config.json").write_text(json.dumps({**hf, **changed}))
        assert main(["verify", str(source), str(other)]) == seen
        if seen:
            key = next(iter(changed))
            assert (f"{key}.num_heads: 2 and 4" if key == "vision_config" else key) in capsys.readouterr().out


def test_missing_and_damaged_tensors_are_reported(saved, tmp_path: Path, capsys) -> None:
    source = saved("qwen2_5_vl")
    tensors = load_file(source / "model.safetensors")
    for name, change, message in (
        ("visual.blocks.1.norm2.weight", None, "1 missing tensor (visual.blocks.1.norm2.weight)"),
        ("visual.merger.mlp.0.bias", torch.zeros(3), "visual.merger.mlp.0.bias has shape [3], expected [64]"),
    ):
        broken = tmp_path / name
        shutil.copytree(source, broken)
        changed = {key: x for key, x in tensors.items() if key != name} | (
            {} if change is None else {name: change}
        )
        save_file(changed, broken / "model.safetensors", {"format": "pt"})
        assert main([f"--checkpoint_path={broken}", f"--output_path={tmp_path / 'out'}"]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("case", ["qwen3_vl_moe", "mistral3"])
def test_a_cast_reaches_both_parts(case: str, saved, convert) -> None:
    back = convert(convert(saved(case), "mca", "--fp32", tp=2), "hf")
    for name, tensor in hf_tensors(saved(case)).items():
        assert torch.equal(tensor.float(), hf_tensors(back)[name]), name
    config = json.loads((back / "config.json").read_text())
    assert {part.get("dtype") for part in (config, config["text_config"], config["vision_config"])} <= {
        "float32",
        None,
    }


def test_fp8_is_read_next_to_a_vision_model(saved, convert, tmp_path: Path) -> None:
    plain = fp8_copy(saved("qwen3_vl"), tmp_path / "fp8")
    back = hf_tensors(convert(convert(tmp_path / "fp8", "mca", "--fp32", tp=2, pp=2), "hf"))
    assert back.keys() == plain.keys()
    for name, tensor in plain.items():
        assert torch.equal(bits(back[name]), bits(tensor.float())), name


def test_inspect_tells_both_parts(saved, convert, capsys) -> None:
    for path in (saved("qwen3_vl"), convert(saved("qwen3_vl"), "mca", tp=2)):
        capsys.readouterr()
        assert main(["inspect", str(path), "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)["facts"]
        tower = {name: x.numel() for name, x in hf_tensors(saved("qwen3_vl")).items() if ".visual." in name}
        mergers = sum(count for name, count in tower.items() if "merger" in name)
        assert facts["projector parameters"] == mergers
        assert facts["vision parameters"] == sum(tower.values()) - mergers
        assert "audio parameters" not in facts
        assert facts["text part"] == "qwen3_vl_text"
        assert "depth 3, hidden_size 16" in facts["vision part"]


# those with experts take five seconds each
@pytest.mark.cases(0, always=["gemma-3-27b", "internvl3-78b", "qwen2.5-vl-72b"])
@pytest.mark.parametrize("name", PLANNED)
def test_published_models_plan_from_config_json_alone(name: str, tmp_path: Path, capsys) -> None:
    source = tmp_path / "hf"
    source.mkdir()
    shutil.copy(CONFIGS / f"{name}.json", source / "config.json")
    text = json.loads((source / "config.json").read_text()).get("text_config", {})
    shared = text.get("hidden_size_per_layer_input") or text.get("num_global_key_value_heads") == 1
    stages, ranks = (1, 1) if shared else (2, 2)  # Gemma 4's embeddings of layers, and its single key head
    flags = [f"--tensor_model_parallel_size={ranks}", f"--pipeline_model_parallel_size={stages}", "--json"]
    if text.get("num_hidden_layers") == 61:
        flags.append("--num_layers_in_first_pipeline_stage=30")
    assert main(["plan", "--checkpoint_path", str(source), *flags]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert not plan["refusals"] and len(plan["stages"]) == stages
    assert plan["parameters"] > 0.4e9


def test_a_size_that_no_tower_has_is_named_with_its_file(saved, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((saved("gemma3") / "config.json").read_text())
    config["vision_config"]["patch_size"] = 0
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["plan", "--checkpoint_path", str(folder)]) == 1
    assert f"{folder}/config.json: 'vision_config.patch_size' of config.json is 0" in capsys.readouterr().out
    assert main(["inspect", str(folder)]) == 1
