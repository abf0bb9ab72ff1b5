"""The files in recipes/ are runs that can be made, and need what their first lines say.

Whether they are the fastest is not searched again.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import yaml

from mca_models.megatron import platform

ROOT = Path(__file__).resolve().parents[2]
USABLE = 75.1
"""GiB that an H100 of 80 GB leaves."""


def _tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = _tool("recipes_page")
RECIPES = {path.stem: (model, job, path) for model, job, path in TOOL.recipes()}


def test_every_file_is_a_recipe_and_the_page_has_a_row_for_each():
    assert {path.stem for path in TOOL.FOLDER.iterdir()} == set(RECIPES)
    assert f"<!-- recipes -->\n{TOOL.table()}\n<!-- end recipes -->" in TOOL.PAGE.read_text(), (
        "uv run tools/recipes_page.py"
    )


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_accepted_by_its_job(name):
    from mca_train.run.settings import make_settings
    from mca_train.tasks import TASKS

    model, job, path = RECIPES[name]
    text = path.read_text()
    kind, devices, *_ = TOOL.HEADER.match(text).groups()
    assert (kind, int(devices)) == (TOOL.JOBS[job][0], model.devices[job])
    values = yaml.safe_load(text)
    assert values.pop("bf16") is True  # refused by Hugging Face where there is no GPU
    settings = make_settings(TASKS[kind], values, path.name)
    assert settings.data.model_name_or_path == model.name
    assert (settings.lora.lora_rank is not None) == (job == "lora")


@pytest.mark.cases(12, always=["qwen3-8b-sft", "qwen3-30b-a3b-lora"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_and_needs_what_it_says(name, monkeypatch):
    """With megatron-core 0.16, as recorded; from 0.18 on, a virtual pipeline needs up to 4 GiB less."""
    monkeypatch.setattr(platform, "megatron_version", lambda: (0, 16, 1))
    model, _, path = RECIPES[name]
    text = path.read_text()
    kind, devices, gib, _ = TOOL.HEADER.match(text).groups()
    needs = TOOL.fullest(model, kind, yaml.safe_load(text), int(devices)) / 2**30
    assert needs == pytest.approx(float(gib), abs=0.55)
    assert needs <= USABLE


@pytest.mark.qualify
def test_the_table_of_the_page_on_memory_is_what_the_planner_says():
    """Plan each row of docs/scale.md; the picture is drawn from them."""
    pictures = _tool("concept_pictures")
    page = pictures.MEMORY_PAGE.read_text()
    run = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    values = {key: value for key, value in run.items() if not key.endswith(("_file", "_dir", "_path"))}
    first, *rows = pictures.memory_rows()
    assert len(rows) == 8
    base = {"use_distributed_optimizer": True}
    for keys, cells in [("", first[1]), *rows]:
        more = base | yaml.safe_load(keys.replace("`, `", "\n").strip("`")) if keys else {}
        (stage, *_) = sorted(
            TOOL.plan(TOOL.MODELS[0], "sft", values | more, 8)["stages"], key=lambda each: -each["total"]
        )
        sizes = [stage[part] for part in ("weights", "gradients", "optimizer")]
        sizes += [stage["activations"] + stage["temporaries"], stage["total"]]
        assert [size / 2**30 for size in sizes] == pytest.approx(cells, abs=0.11), keys
