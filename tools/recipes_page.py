"""Write recipes/*.yaml and the table of docs/scale.md: layouts that fit and are predicted to be fast.

Run ``uv run tools/recipes_page.py NAME ...`` to search the layouts of recipes again (a minute each; ``all``: every
one), and without names to write the table from the files. A file holds a complete run and, at its top, the prediction.
"""

import contextlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from mca_config.reference import update_document

ROOT = Path(__file__).resolve().parent.parent
PAGE, FOLDER = ROOT / "docs" / "scale.md", ROOT / "recipes"
_CONFIGS = (ROOT / "tools" / "recipes", ROOT / "packages" / "mca-models" / "tests" / "data" / "configs")
_DEVICE = "h100-80"
_GIB = 1 << 30
HEADER = re.compile(
    r"# mca-train (\w+) on (\d+) x H100 80 GB\n"
    r"# Predicted: (\d+) GiB on the fullest rank, ([\d,]+) tokens/s and device\n"
)
"""First lines of a file: job, devices, GiB, tokens per second and device."""
JOBS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "sft": ("sft", {"learning_rate": 1.0e-5}),
        "lora": ("sft", {"lora_rank": 16, "learning_rate": 1.0e-4}),
        "dpo": ("dpo", {"learning_rate": 5.0e-7}),
    }
)
"""Job and its keys, by the end of a file's name."""
_FILES = {"sft": "data/chat.jsonl", "dpo": "data/pairs.jsonl"}
_RUN: dict[str, Any] = {
    "seq_length": 8192,
    "sequence_packing": True,
    "bf16": True,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
_SAMPLES = 128
_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


@dataclass(frozen=True)
class Model:
    """A model, and the number of devices of each of its recipes."""

    name: str
    config: str
    devices: Mapping[str, int]


def _model(name: str, config: str, sft: int, lora: int, **more: int) -> Model:
    return Model(name, config, {"sft": sft, "lora": lora, **more})


MODELS = (
    _model("Qwen/Qwen3-8B", "qwen3-8b", 8, 1, dpo=8),
    _model("Qwen/Qwen3-32B", "qwen3-32b", 32, 4),
    _model("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b", 16, 4),
    _model("Qwen/Qwen3-235B-A22B", "qwen3-235b-a22b", 128, 16),
    _model("meta-llama/Llama-3.1-8B", "llama-3.1-8b", 8, 1),
    _model("meta-llama/Llama-3.3-70B-Instruct", "llama-3.3-70b", 64, 8),
    _model("meta-llama/Llama-3.1-405B", "llama-3.1-405b", 256, 32),
    _model("openai/gpt-oss-20b", "gpt-oss-20b", 16, 2),
    _model("openai/gpt-oss-120b", "gpt-oss-120b", 64, 8),
    _model("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b", 32, 4),
    _model("zai-org/GLM-4.5-Air", "glm-4.5-air", 64, 8),
    _model("deepseek-ai/DeepSeek-V3", "deepseek-v3", 512, 64),
)


def recipes() -> Iterator[tuple[Model, str, Path]]:
    """Yield model, end of the name, and file of every recipe."""
    for model in MODELS:
        for job in model.devices:
            yield model, job, FOLDER / f"{model.config}-{job}.yaml"


def main(names: list[str]) -> None:
    """Search the recipes ``names`` again, then write the table."""
    for model, job, path in recipes():
        if path.stem in names or names == ["all"]:
            sys.stderr.write(f"{path.stem}\n")
            path.write_text(recipe_text(model, job), encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(update_document(text, {"recipes": table}), encoding="utf-8")


def recipe_text(model: Model, job: str) -> str:
    """Return the file of the fastest layout that fits.

    Raises:
        SystemExit: No layout fits.
    """
    kind, keys = JOBS[job]
    gpus = model.devices[job]
    values = _RUN | keys
    found = plan(model, kind, values | _samples(gpus), gpus, "--search")["layouts"]
    if not found:
        raise SystemExit(f"{model.name} does not fit {gpus} x {_DEVICE}: {job}")
    values |= {name: value for name, value in found[0]["changes"].items() if _is_written(name, value)}
    return written(model, job, values, fullest(model, kind, values, gpus), _speed(found[0]))


def written(model: Model, job: str, values: dict[str, Any], needs: int, speed: float) -> str:
    """Return the text of a file, with its prediction in two digits."""
    kind = JOBS[job][0]
    digits = 10 ** (len(str(round(speed))) - 2)
    run = {
        "model_name_or_path": model.name,
        "train_file": _FILES[kind],
        "output_dir": f"runs/{model.config}-{job}",
        "num_train_epochs": 1,
        "save_hf_model": True,
        **values,
    }
    return (
        f"# mca-train {kind} on {model.devices[job]} x H100 80 GB\n"
        f"# Predicted: {needs / _GIB:.0f} GiB on the fullest rank, "
        f"{round(speed / digits) * digits:,} tokens/s and device\n"
        f"{yaml.safe_dump(run, sort_keys=False)}"
    )


def table() -> str:
    """Return the table of all files."""
    lines = [
        "| file | devices | layout | GiB of a rank | tokens/s and device |",
        "|---|---|---|---|---|",
    ]
    for _, _, path in recipes():
        text = path.read_text(encoding="utf-8")
        header = HEADER.match(text)
        if header is None:
            raise SystemExit(f"{path}: expected first lines as tools/recipes_page.py writes them")
        link = f"[`recipes/{path.name}`](../recipes/{path.name})"
        cells = (link, header[2], _layout(yaml.safe_load(text)), header[3], header[4])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _layout(values: dict[str, Any]) -> str:
    sizes = [f"{short} {values[key]}" for short, key in _SIZES.items() if key in values]
    recompute = values.get("recompute_granularity")
    return ", ".join([*sizes, *([f"{recompute} recompute"] if recompute else [])]) or "data parallel"


def _speed(found: dict[str, Any]) -> float:
    return float(found["tokens_per_second_and_device"])


def _is_written(name: str, value: Any) -> bool:
    """Return whether a file has this key; a parallel size of 1 is the default, except that of expert tensors."""
    is_default = name.endswith("_parallel_size") and name != "expert_tensor_parallel_size" and value == 1
    return value is not None and not is_default


def _samples(gpus: int) -> dict[str, int]:
    """Return keys by which a step has `_SAMPLES` samples; the search takes nothing else of them."""
    return {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": max(_SAMPLES // gpus, 1),
        "pipeline_model_parallel_size": max(gpus // _SAMPLES, 1),
    }


def fullest(model: Model, kind: str, values: dict[str, Any], gpus: int) -> int:
    """Return the bytes of the fullest stage of a run, by the plan."""
    stages = plan(model, kind, values, gpus)["stages"]
    return max(int(stage["total"]) for stage in stages)


def plan(model: Model, kind: str, values: dict[str, Any], gpus: int, *flags: str) -> dict[str, Any]:
    """Return the output of ``mca-train plan --json``, with the model's published ``config.json``.

    Raises:
        SystemExit: The run is impossible.
    """
    from mca_train.cli import main as mca_train

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = next(path for root in _CONFIGS if (path := root / f"{model.config}.json").exists())
        (folder / "config.json").write_text(config.read_text())
        run = {"train_file": "x.jsonl", **values, "model_name_or_path": name, "output_dir": f"{name}/runs"}
        (folder / "run.yaml").write_text(yaml.safe_dump(run))
        words = ["plan", kind, f"{name}/run.yaml", "--gpus", str(gpus), "--device", _DEVICE, "--json", *flags]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            mca_train(words)
    document: dict[str, Any] = json.loads(printed.getvalue())
    if document.get("possible") is False:
        raise SystemExit(f"{model.name}: {document['problems']}")
    return document


if __name__ == "__main__":
    main(sys.argv[1:])
