"""The device's part of an offloaded optimizer steps once its gradients are there."""

from typing import Any

import pytest
import torch

from mca_models.megatron import platform
from mca_models.megatron.platform.cuda import IdleStream


class Noted(IdleStream):
    """A stream that notes for which others it was reported to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[object] = []

    def wait_stream(self, other: object) -> None:
        """Notes it."""
        self.waited.append(other)


@pytest.mark.skipif(
    platform.device_type() == "cuda", reason="streams are replaced, and optimizers are the host's"
)
@pytest.mark.parametrize("precise", [True, False])
def test_the_devices_step_waits_for_gradients_of_another_stream(
    precise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform.prepare()
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    current = Noted()
    monkeypatch.setattr(torch.cuda, "Stream", Noted)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    dtype = torch.bfloat16 if precise else torch.float32
    params = [torch.nn.Parameter(torch.ones(4, dtype=dtype)) for _ in range(4)]
    hybrid: Any = HybridDeviceOptimizer(
        params,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        lr=0.1,
        param_update_in_fp32=precise,
        overlap_cpu_optimizer_d2h_h2d=True,
    )
    for param in params:
        param.grad = torch.ones_like(param)
    before: list[bool] = []
    hybrid.gpu_optimizer.register_step_pre_hook(
        lambda *_: before.append(hybrid._d2h_stream in current.waited)
    )
    hybrid.step()
    assert before == [precise]
    assert all(bool((param < 1).all()) for param in params)
