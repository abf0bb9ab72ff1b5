"""The recipes of docs/recipes.md are runs that can be made, and need what the page says.

Whether they are the fastest is not searched again.
"""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}
_SHOWN = re.compile(r"\*\*.*?\*\* on (\d+) devices?: ([\d.]+) GiB.*?```yaml\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("recipes_page", ROOT / "tools" / "recipes_page.py")
    sys.modules["recipes_page"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_recipe_below_the_first_lines_is_a_configuration(tool, tmp_path):
    from mca_train.config.run_config import parse
    from mca_train.config.source import read_yaml

    head, *recipes = re.findall(r"```yaml\n(.*?)```", tool.PAGE.read_text(), re.DOTALL)
    assert len(recipes) == 2 * len(tool.RECIPES)
    for number, recipe in enumerate(recipes):
        (tmp_path / "sft.yaml").write_text(head + recipe)
        values = read_yaml(tmp_path / "sft.yaml")
        assert values.pop("bf16") is True  # refused by Hugging Face where there is no GPU
        settings = parse(values, "sft.yaml", kind="sft")
        assert settings.data.model_name_or_path == tool.RECIPES[number // 2].model
        assert settings.training.learning_rate == (1e-4 if settings.lora.lora_rank else 1e-5)


def test_the_page_has_a_section_for_each_recipe(tool):
    assert list(SECTIONS) == [recipe.model for recipe in tool.RECIPES]


@pytest.mark.cases(0, always=["Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"])
@pytest.mark.parametrize("model", SECTIONS)
def test_recipes_need_what_the_page_says(model, tool):
    (recipe,) = (recipe for recipe in tool.RECIPES if recipe.model == model)
    shown = _SHOWN.findall(SECTIONS[model])
    assert [int(gpus) for gpus, _, _ in shown] == [recipe.whole, recipe.adapter]
    for gpus, gib, text in shown:
        values = yaml.safe_load(text)
        assert values.pop("model_name_or_path") == recipe.model
        needs = tool.fullest(recipe, values, int(gpus)) / 2**30
        assert needs == pytest.approx(float(gib), abs=0.06)  # a tenth is shown
        assert needs <= 75.1  # what an H100 leaves
