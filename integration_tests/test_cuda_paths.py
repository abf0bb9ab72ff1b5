"""A step for CUDA mixes no devices and waits for the GPU only where Megatron must know sizes, or at the step's end.

Here there is no GPU: see fake_cuda. Kernels, values and the order of streams are not covered. ``MCA_DRY_RUNS=1`` runs
every case, the default a sample.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from layouts import chosen
from test_dry_run import CP, FULL, LORA, MODELS, PP, SPLIT, TP

pytestmark = pytest.mark.fork
HERE = Path(__file__).parent
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
ONCE = {
    "value in clip_grads.py:get_grad_norm_fp32": 1,  # the gradient norm, which is logged
    "value in engine.py:optimizer_step": 1,  # whether there was a target; all that the norm waits for has run then
}
"""What a step may wait for, and how often."""
ALWAYS = {
    "size in moe_utils.py:permute",  # tokens of each expert, without its fused kernel
    "torch.cuda.synchronize in p2p_communication.py:_communicate",  # with batch_p2p_comm
}
"""What Megatron's own local layers and schedules wait for in every pass."""
PLANTED = ("planted tensor", "planted item")
SAMPLE = ("packed lora", "experts ep", *PLANTED)
CHOSEN = tuple(CASES) if os.environ.get("MCA_DRY_RUNS") else SAMPLE


@contextmanager
def plant(fault: str) -> Iterator[None]:
    """A block with a fault in the loss: a tensor of the host's, or a value that is read."""
    import torch

    from mca_train.losses import token_loss

    plain = token_loss.token_loss

    def faulty(output: Any, batch: Any) -> Any:
        if fault == "item":
            float(output.mean())
        else:
            output = output * torch.ones(output.shape, device="cpu")
        return plain(output, batch)

    if not fault:
        yield
        return
    with patch("mca_train.trainer.trainer.token_loss", faulty):
        yield


def waits_of(folder: Path, cases: dict[str, dict[str, Any]], timeout: int) -> dict[str, Any]:
    """What the steps of ``cases`` wait for, one after the other in a process of its own; of those that fail, why."""
    driver = folder / f"no_driver_{len(list(folder.iterdir()))}.so"
    build = ["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*build, "-o", driver, HERE / "no_driver.c"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(driver), "MCA_DEVICE": "cuda", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "fake_cuda.py"), str(folder), json.dumps(cases)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert ran.returncode == 0, ran.stderr[-4000:]
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    names = [name for name in CHOSEN if name in PLANTED or name in chosen(request, "name")]
    folder: Path = tmp_path_factory.mktemp("cuda")
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return waits_of(folder, {name: {"model": "dense"} | CASES[name] for name in names}, 240)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [name for name in CHOSEN if name not in PLANTED])
def test_a_step_waits_for_the_gpu_only_where_it_must(name: str, found: dict[str, Any]) -> None:
    waits = found[name]
    assert isinstance(waits, dict), waits
    assert "value in clip_grads.py:get_grad_norm_fp32" in waits  # the watch sees
    assert waits.keys() <= ONCE.keys() | ALWAYS
    assert all(waits.get(place, 0) <= times for place, times in ONCE.items())


def test_planted_faults_are_found(found: dict[str, Any]) -> None:
    assert "two devices, cuda:0 and cpu" in found["planted tensor"]
    assert found["planted item"]["value in test_cuda_paths.py:faulty"] == 1
