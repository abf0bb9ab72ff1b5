"""A step for CUDA mixes no devices and waits for the GPU only where Megatron must know sizes, or at the step's end.

These tests use no GPU: see `fake_cuda`. They do not cover kernels, values and the order of streams.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cases import needed
from cuda_waits import ALWAYS, ONCE, waits_of
from dry_run_cases import CP, FULL, LORA, MODELS, PP, SPLIT, TP

pytestmark = pytest.mark.fork
CASES: dict[str, dict[str, Any]] = {
    "dense": {"run": ("sft", {"bf16": True})},
    "packed lora": {"run": ("sft", {"sequence_packing": True, "bf16": True} | LORA)},
    "recompute split": {"run": ("sft", {"bf16": True} | FULL | SPLIT)},
    "tp sp": {"run": ("sft", {TP: 2, "sequence_parallel": True, "bf16": True})},
    "pp": {"run": ("pretrain", {PP: 2, "bf16": True})},
    "cp packed": {"run": ("sft", {CP: 2, "sequence_packing": True, "bf16": True})},
    "dpo": {"run": ("dpo", {"bf16": True})},
    "experts": {"model": "experts", "run": ("sft", {"bf16": True})},
    "experts ep": {
        "model": "experts",
        "run": ("sft", {"expert_model_parallel_size": 2, "bf16": True} | SPLIT),
    },
    "planted tensor": {"run": ("sft", {"bf16": True}), "planted": "tensor"},
    "planted item": {"run": ("sft", {"bf16": True}), "planted": "item"},
}
PLANTED = {
    "planted tensor": r"two (different )?devices,? cuda:0(,| and) cpu",
    "planted item": r"'value in cuda_waits.py:faulty': 1\b",
}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    names = needed(request, "name")
    folder: Path = tmp_path_factory.mktemp("cuda")
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return waits_of(folder, {name: {"model": "dense"} | CASES[name] for name in names}, 240)


@pytest.mark.qualify  # 9 s of a separate process; .ci/run runs "experts ep" and the planted faults
@pytest.mark.parametrize("name", [name for name in CASES if name not in PLANTED])
def test_a_step_waits_for_the_gpu_only_where_it_must(name: str, found: dict[str, Any]) -> None:
    waits = found[name]
    assert isinstance(waits, dict), waits
    assert "value in clip_grads.py:get_grad_norm_fp32" in waits  # the watch sees
    assert waits.keys() <= ONCE.keys() | ALWAYS
    assert all(waits.get(place, 0) <= times for place, times in ONCE.items())


@pytest.mark.qualify
@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name: str, found: dict[str, Any]) -> None:
    assert re.search(PLANTED[name], str(found[name]))
