"""The runs of the documents fit the devices that their files name: each is planned, with the flags of each command.

The second line of a file names the devices: ``# on 8 x H100 80 GB``; so does the end of a command without a file.
"""

import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pages import blocks
from source_tree import ROOT

FILE = re.compile(r"# (\w+\.yaml)\n(?:# on (\d+) x H100 80 GB\n)?")
BY_FLAGS = re.compile(r"^\$ mca-train (\w+ --.*)  # on (\d+) x H100 80 GB$", re.MULTILINE)
ELSEWHERE = {
    "scale.md": "its file is planned on the page, and does not fit there",
}
KINDS = ("pretrain", "sft", "dpo", "kto", "reward", "classify")


def console(page: Path) -> str:
    """Return the commands of ``page``, each on one line."""
    return "\n".join(blocks(page, "console")).replace("\\\n", " ")


PAGES = [
    page
    for page in (
        ROOT / "README.md",
        ROOT / "packages/mca-train/README.md",
        *sorted((ROOT / "docs").glob("*.md")),
    )
    if page.name not in ELSEWHERE
    and (any(map(FILE.match, blocks(page, "yaml"))) or BY_FLAGS.search(console(page)))
]


@cache
def configs() -> dict[str, dict[str, Any]]:
    """The ``config.json`` of each model, as published."""
    data = ROOT / "packages" / "mca-models" / "tests" / "data" / "vision_configs"
    seeing = json.loads((data / "qwen2.5-vl-72b.json").read_text())
    sizes = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
    }
    seeing |= sizes | {"num_key_value_heads": 4, "max_window_layers": 28}
    seeing["vision_config"] = seeing["vision_config"] | {"out_hidden_size": 3584, "intermediate_size": 3420}
    dense = json.loads((ROOT / "tools" / "recipes" / "qwen3-8b.json").read_text())
    half = {"torch_dtype": "bfloat16"}
    return {"Qwen3-8B": dense | half, "Qwen/Qwen2.5-VL-7B-Instruct": seeing | half}


def commands(page: Path) -> list[list[str]]:
    """Return the commands of ``page`` that train with a file: kind, file, flags."""
    lines = console(page).splitlines()
    words = [shlex.split(line, comments=True) for line in lines if line.startswith("$ mca-train ")]
    return [found[2:] for found in words if found[2] in KINDS]


def needs(kind: str, file: Path | None, flags: list[str], gpus: int) -> tuple[int, list[int]]:
    """Bytes of the fullest stage, and the stages that do not fit."""
    from mca_models.megatron.factory.transformer_config import Target
    from mca_train.plan.hardware import load_hardware
    from mca_train.plan.memory import plan_layout
    from mca_train.plan.search import largest_stage, stages_over_limit
    from mca_train.run.plan_input import make_image_check, make_plan_input, planned_media
    from mca_train.run.rules import check
    from mca_train.run.settings import load_values, make_settings
    from mca_train.tasks import TASKS

    values, where = load_values(file, flags)
    if values.pop("bf16", None):
        values["use_cpu"] = True  # Hugging Face refuses bf16 where there is no GPU
        values["bf16"] = True
    task, target = TASKS[kind], Target.planned("transformer_engine")
    settings = make_settings(task, values, where)
    findings = check(task, settings, lambda *_: gpus, target)
    assert findings.run is not None and not findings.impossible, findings.impossible
    run, device = findings.run, load_hardware("h100-80").device
    images = planned_media(run)
    if images is not None:
        assert not make_image_check(run, target)(run.layout)
    subject = make_plan_input(run, "transformer_engine", device, media=images)
    plan = plan_layout(subject, run.settings.training, run.layout, run.world_size)
    return largest_stage(plan), stages_over_limit(plan, device)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_runs_of_a_page_fit_the_devices_that_it_names(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, config in configs().items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    devices: dict[str, int] = {}
    for text in blocks(page, "yaml"):
        if found := FILE.match(text):
            assert found[2], f"{found[1]}: expected a second line such as '# on 8 x H100 80 GB'"
            (tmp_path / found[1]).write_text(text)
            devices[found[1]] = int(found[2])
    planned = []
    runs: list[tuple[str, Path | None, list[str], int]] = [
        (kind, tmp_path / file, flags, devices[file])
        for kind, file, *flags in commands(page)
        if file in devices
    ]
    for command, gpus in BY_FLAGS.findall(console(page)):
        kind, *flags = shlex.split(command)
        runs.append((kind, None, flags, int(gpus)))
    for kind, path, flags, gpus in runs:
        total, too_full = needs(kind, path, flags, gpus)
        planned.append(kind)
        assert not too_full, f"{kind} {path} {' '.join(flags)}: {total / 2**30:.1f} GiB"
    assert planned
