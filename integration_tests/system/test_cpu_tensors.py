"""Tensors that are created for CUDA on ranks of the CPU."""

import pickle
from functools import partial
from typing import Any

import pytest
import torch

from harness import run_ranks


@pytest.mark.ranks
def test_tensors_for_cuda_are_created_on_the_cpu() -> None:
    (found,) = run_ranks(1, created, process_group=False)
    assert found["devices"] == ["cpu"] * len(found["devices"])
    assert found["types"] == ["torch.cuda.FloatTensor"] * 2
    assert found["meta"] == ["meta", "meta", "cpu"]
    assert found["is_pinned"] is False
    assert found["scripted"] == [2.0, 2.0]
    assert found["pickled"] == found["names"]


def created() -> dict[str, Any]:
    """Return the devices and types of tensors created in several ways."""
    from torch.overrides import BaseTorchFunctionMode

    x = torch.ones(2)
    on_cuda = [
        torch.zeros(2, device="cuda"),
        torch.tensor([1.0], device=torch.device("cuda", 0)),
        torch.empty_like(x, device="cuda:0"),
        torch.normal(0.0, 1.0, (2,), device="cuda"),
        torch.fft.fftfreq(4, device="cuda"),
        torch.fft.rfftfreq(4, device="cuda"),
        torch.nested.nested_tensor([x], device="cuda"),
        torch.nested.as_nested_tensor([x], device="cuda"),
        torch.signal.windows.hann(4, device="cuda"),
        x.new_zeros(2, device="cuda"),
        x.new(2, device="cuda"),
        x.to("cuda"),
        x.to(device="cuda"),
        x.to(torch.device("cuda"), torch.float16),
        torch.nn.Linear(2, 2, device="cuda").to("cuda").weight,
    ]
    with torch.device("cuda"):
        on_cuda += [torch.empty(2), torch.tensor([1.0]), torch.fft.fftfreq(4), torch.nn.Linear(2, 2).weight]
    torch.set_default_device("cuda:0")
    on_cuda.append(torch.zeros(2))
    torch.set_default_device(None)
    with torch.device("meta"):
        meta = [torch.empty(2), torch.nn.Linear(2, 2).weight, torch.empty(2, device="cuda")]
    with BaseTorchFunctionMode():
        inside = x.type()
    functions = (
        torch.empty,
        torch.zeros_like,
        torch.fft.fftfreq,
        torch.nested.nested_tensor,
        torch.Tensor.new,
        torch.Tensor.to,
    )
    return {
        "devices": [t.device.type for t in on_cuda],
        "types": [x.type(), inside],
        "meta": [t.device.type for t in meta],
        "is_pinned": torch.empty(2, pin_memory=True).is_pinned(),
        "names": [f.__qualname__ for f in functions],
        "pickled": [f.__qualname__ for f in functions if pickle.loads(pickle.dumps(partial(f))).func is f],
        "scripted": torch.jit.script(twos_like)(x).tolist(),
    }


def twos_like(x: torch.Tensor) -> torch.Tensor:
    """Create tensors in TorchScript."""
    return torch.zeros_like(x) + torch.ones(x.shape) * 2
