"""verl trains on mca's engine with the losses of its own FSDP engine, and resumes bit for bit.

    .venv-verl/bin/python -m pytest -n 0 integration_tests/cli/test_verl.py

verl's own SFT trainer runs both engines on forked CPU ranks.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cases import needed
from train_cases import sparse_checkpoint
from verl_data import FSDP, MCA, sft_overrides, write_inputs

PROGRAM = Path(__file__).parents[1] / "support" / "verl_jobs.py"
STEPS = 20

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.one_fork,
    pytest.mark.timeout(1800),
    pytest.mark.xdist_group("verl"),
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl (.ci/verl.txt)"),
]

SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
    "vpp2": (2, {"pp": 2, "vpp": 2}),
    "tp2pp2": (4, {"tp": 2, "pp": 2}),
    "dp2cp2": (4, {"cp": 2}),
}
"""Ranks and sizes."""


def run_jobs(folder: Path, jobs: list[dict[str, Any]], *, mca: bool) -> None:
    """Run ``jobs`` one after the other in a program that imports verl once."""
    file = folder / f"jobs-{jobs[0]['name']}.json"
    file.write_text(json.dumps(jobs))
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "MCA_DEVICE": "cpu",
    }
    chosen = {"VERL_USE_EXTERNAL_PLUGINS": "mca" if mca else "none"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAM, file],
        env=os.environ | quiet | chosen,
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def sft_job(folder: Path, name: str, ranks: int, *overrides: str, steps: int = STEPS) -> dict[str, Any]:
    everything = [*sft_overrides(folder, name, steps), *overrides]
    return {
        "kind": "sft",
        "name": name,
        "ranks": ranks,
        "log": f"{folder}/{name}.jsonl",
        "overrides": everything,
    }


def layout_job(
    folder: Path, layout: str, *overrides: str, name: str = "", steps: int = STEPS
) -> dict[str, Any]:
    """Return a job of mca on one of `LAYOUTS`."""
    ranks, sizes = LAYOUTS[layout]
    chosen = [f"engine.{SIZES[size]}={number}" for size, number in sizes.items()]
    return sft_job(folder, name or layout, ranks, *MCA, *chosen, *overrides, steps=steps)


def logged(folder: Path, name: str, key: str) -> list[float]:
    """Return a logged value of each step of run ``name``."""
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["data"][key] for line in lines]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("verl")
    write_inputs(folder)
    return folder


def replay_job(folder: Path, layout: str, *, packed: bool) -> dict[str, Any]:
    ranks, sizes = LAYOUTS[layout]
    named = {SIZES[size]: number for size, number in sizes.items()}
    same = {"kind": "replay", "name": f"replay-{layout}", "ranks": ranks, "sizes": named}
    return same | {"packed": packed, "model": str(folder / "sparse")}


def test_the_engine_replays_the_experts_of_the_rollout(inputs: Path) -> None:
    """Log-probabilities are those of `VirtualModels.log_probs`, which is compared with a forced transformers model."""
    sparse_checkpoint(inputs / "sparse")
    layouts = {"tp2": True, "cp2": True, "pp2": False}
    run_jobs(inputs, [replay_job(inputs, name, packed=packed) for name, packed in layouts.items()], mca=True)


@pytest.fixture(scope="module")
def fsdp(inputs: Path) -> Path:
    run_jobs(inputs, [sft_job(inputs, "fsdp", 2, *FSDP, "trainer.resume_mode=disable")], mca=False)
    return inputs


@pytest.fixture(scope="module")
def mca(request: pytest.FixtureRequest, inputs: Path) -> Path:
    jobs = [layout_job(inputs, layout, "trainer.save_freq=10") for layout in needed(request, "layout")]
    run_jobs(inputs, jobs, mca=True)
    return inputs


@pytest.mark.cases(0, always=["dp2", "tp2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sft_has_the_losses_of_the_fsdp_engine(layout, mca, fsdp):
    for key in ("train/loss", "train/grad_norm", "train/lr"):
        ours, theirs = logged(mca, layout, key), logged(fsdp, "fsdp", key)
        assert len(ours) == STEPS
        assert ours == pytest.approx(theirs, rel=1e-5), key  # fp32 sums in another order; 20 Adam steps
