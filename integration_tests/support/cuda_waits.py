"""Waits of a step for CUDA: allowed ones, their detection (see `fake_cuda`), and faults that must be found."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).parent
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
    """Return the waits of the steps of ``cases``, one by one in a separate process, or the error of a failed one."""
    driver = folder / f"no_driver_{len(list(folder.iterdir()))}.so"
    build = ["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*build, "-o", driver, HERE / "no_driver.c"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(driver), "MCA_DEVICE": "cuda", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "fake_cuda.py"), str(folder), json.dumps(cases)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert ran.returncode == 0, ran.stderr[-4000:]
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result
