"""Writes docs/recipes.md: for models that people ask for, a layout that fits and is predicted to be fast.

Run as ``uv run tools/recipes_page.py [NAME ...]``; without names all recipes are made anew (some minutes). Each is what
``mca-train plan sft --search`` finds, with the memory that ``mca-train plan sft --device`` says of it.
"""

import contextlib
import io
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "recipes.md"
_FOLDERS = (ROOT / "tools" / "recipes", ROOT / "packages" / "mca-models" / "tests" / "data" / "configs")
_DEVICE = "h100-80"
_GIB = 1 << 30


@dataclass(frozen=True)
class Recipe:
    """One model, and on how many devices it is trained whole and by an adapter."""

    model: str
    config: str
    whole: int
    adapter: int


RECIPES = (
    Recipe("Qwen/Qwen3-8B", "qwen3-8b", 8, 1),
    Recipe("Qwen/Qwen3-32B", "qwen3-32b", 32, 4),
    Recipe("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b", 16, 4),
    Recipe("Qwen/Qwen3-235B-A22B", "qwen3-235b-a22b", 128, 16),
    Recipe("meta-llama/Llama-3.1-8B", "llama-3.1-8b", 8, 1),
    Recipe("meta-llama/Llama-3.3-70B-Instruct", "llama-3.3-70b", 64, 8),
    Recipe("meta-llama/Llama-3.1-405B", "llama-3.1-405b", 256, 32),
    Recipe("openai/gpt-oss-20b", "gpt-oss-20b", 16, 2),
    Recipe("openai/gpt-oss-120b", "gpt-oss-120b", 64, 8),
    Recipe("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b", 32, 4),
    Recipe("zai-org/GLM-4.5-Air", "glm-4.5-air", 64, 8),
    Recipe("deepseek-ai/DeepSeek-V3", "deepseek-v3", 512, 64),
)
_RUN: dict[str, Any] = {
    "seq_length": 8192,
    "sequence_packing": True,
    "bf16": True,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
_SAMPLES = 128
_WHOLE = {"learning_rate": 1.0e-5}
_LORA = {"lora_rank": 16, "learning_rate": 1.0e-4}
_HEAD = f"""# Recipes

This page has recipes for twelve models: fine-tuning with packed rows of 8,192 tokens, {_SAMPLES} rows in a
step, in bf16 on {_DEVICE} devices. Each recipe is the fastest layout that `mca-train plan sft
CONFIG.yaml --search` finds; its memory is that of the fullest stage in `mca-train plan sft CONFIG.yaml
--device {_DEVICE}`. These are predictions, made by `tools/recipes_page.py`: none of these models has been
trained with mca on such a machine. For other sizes, devices or lengths, run a search; it takes seconds.

Paste a recipe below these lines, and enter the path of your data:

```yaml
# sft.yaml
train_file: data/chat.jsonl
output_dir: runs/sft
num_train_epochs: 1
save_hf_model: true
```
"""


def main(names: list[str]) -> None:
    """Make the recipes of ``names`` (all, if there are none) anew and keeps the others."""
    old = _sections(PAGE.read_text(encoding="utf-8")) if PAGE.exists() and names else {}
    made: list[str] = []
    for recipe in RECIPES:
        made.append(recipe_text(recipe) if not names or recipe.config in names else old[recipe.model])
        PAGE.write_text("\n".join([_HEAD, *made]), encoding="utf-8")


def _sections(page: str) -> dict[str, str]:
    parts = page.split("\n## ")[1:]
    return {part.partition("\n")[0]: f"## {part}" for part in parts}


def recipe_text(recipe: Recipe) -> str:
    """The section of one model."""
    texts = [f"## {recipe.model}\n"]
    for title, gpus, more in (("Whole model", recipe.whole, _WHOLE), ("LoRA", recipe.adapter, _LORA)):
        sys.stderr.write(f"{recipe.model}, {title.lower()}, {gpus} devices\n")
        values = _RUN | more
        found = _said(recipe, values | _samples(gpus), gpus, "--search")["layouts"]
        if not found:
            raise SystemExit(f"{recipe.model} does not fit {gpus} x {_DEVICE}: {title}")
        best = found[0]
        values |= {name: value for name, value in best["changes"].items() if _is_said(name, value)}
        needs = fullest(recipe, values, gpus)
        texts += [
            f"**{title}** on {gpus} device{'s' * (gpus > 1)}: {needs / _GIB:.1f} GiB of the fullest device, about "
            f"{best['tokens_per_second_and_device']:,.0f} tokens a second and device predicted.\n",
            f"```yaml\n{_written(recipe, values)}```\n",
        ]
    return "\n".join(texts)


def _is_said(name: str, value: Any) -> bool:
    """Return whether a recipe names this key; a parallel size of 1 is the default, except that of expert tensors."""
    is_default = name.endswith("_parallel_size") and name != "expert_tensor_parallel_size" and value == 1
    return value is not None and not is_default


def _samples(gpus: int) -> dict[str, int]:
    """Keys by which a step has `_SAMPLES` samples; the search takes nothing else of them."""
    return {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": max(_SAMPLES // gpus, 1),
        "pipeline_model_parallel_size": max(gpus // _SAMPLES, 1),
    }


def _written(recipe: Recipe, values: dict[str, Any]) -> str:
    shown: str = yaml.safe_dump({"model_name_or_path": recipe.model} | values, sort_keys=False)
    return shown


def fullest(recipe: Recipe, values: dict[str, Any], gpus: int) -> int:
    """Bytes of the fullest stage of a run, by the plan."""
    stages = _said(recipe, values, gpus)["stages"]
    return max(int(stage["total"]) for stage in stages)


def _said(recipe: Recipe, values: dict[str, Any], gpus: int, *flags: str) -> dict[str, Any]:
    """Return the output of ``mca-train plan sft --json``."""
    from mca_train.cli import main as mca_train

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = next(path for root in _FOLDERS if (path := root / f"{recipe.config}.json").exists())
        (folder / "config.json").write_text(config.read_text())
        run = {"model_name_or_path": name, "train_file": "x.jsonl", "output_dir": f"{name}/runs", **values}
        (folder / "run.yaml").write_text(yaml.safe_dump(run))
        words = [
            "plan",
            "sft",
            f"{name}/run.yaml",
            "--gpus",
            str(gpus),
            "--device",
            _DEVICE,
            "--json",
            *flags,
        ]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            mca_train(words)
    document: dict[str, Any] = json.loads(said.getvalue())
    if document.get("possible") is False:
        raise SystemExit(f"{recipe.model}: {document['problems']}")
    return document


if __name__ == "__main__":
    main(sys.argv[1:])
