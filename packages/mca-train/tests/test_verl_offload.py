"""Storages that move to host memory and back; verl's own calls are tested in ``integration_tests/cli/test_verl.py``."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mca_train.clients.verl.offload import EngineOffload, StorageOffload, storages


def test_tensors_and_views_have_their_values_again():
    buffer = torch.arange(12.0)
    view, alone = buffer[3:9].view(2, 3), torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    offload = StorageOffload(lambda: storages([buffer, view, alone.detach()]))
    for _ in range(2):
        offload.offload()
        assert offload.is_offloaded
        assert buffer.untyped_storage().nbytes() == alone.untyped_storage().nbytes() == 0
        offload.offload()
        offload.reload()
        assert not offload.is_offloaded
        assert torch.equal(buffer, torch.arange(12.0)) and torch.equal(view.flatten(), torch.arange(3.0, 9.0))
        assert torch.equal(alone, torch.ones(2, dtype=torch.bfloat16))
    view += 1  # the values of the next offload, not of the first
    offload.offload()
    offload.reload()
    assert torch.equal(buffer[3:9], torch.arange(4.0, 10.0))


def test_zero_gradients_are_not_copied():
    gradients = torch.zeros(5)
    offload = StorageOffload(lambda: storages([gradients]), drops_zeros=True)
    offload.offload()
    assert not offload._host
    offload.reload()
    assert torch.equal(gradients, torch.zeros(5))
    gradients[2] = 3
    offload.offload()
    offload.reload()
    assert gradients.tolist() == [0, 0, 3, 0, 0]


def test_a_storage_of_another_group_stays():
    model = torch.ones(4)
    state = torch.ones(3)
    model_only = storages([model])
    assert storages([model[:2], state], without=model_only).keys() == storages([state]).keys()


def test_a_storage_of_a_gpu_is_copied_to_the_host():
    with FakeTensorMode():
        # after a test that runs Megatron, `torch.empty` takes CUDA devices for the CPU
        weights = torch.ops.aten.empty.memory_format([8], device="cuda")
        offload = StorageOffload(lambda: storages([weights]))
        offload.offload()
        (copy,) = offload._host.values()
        assert (copy.device.type, copy.nbytes, weights.untyped_storage().nbytes()) == ("cpu", 32, 0)
        offload.reload()
        assert (weights.device.type, weights.untyped_storage().nbytes()) == ("cuda", 32)


def test_an_engine_is_offloaded_again_after_an_error():
    model = torch.nn.Linear(3, 2)
    device = SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None)
    offload = EngineOffload(SimpleNamespace(chunks=[model]), None, device)  # type: ignore[arg-type]
    offload.offload(model=True, optimizer=True, grad=False)
    with pytest.raises(OSError, match="disk"), offload.reloaded():
        assert model.weight.untyped_storage().nbytes() == 24
        raise OSError("disk")
    assert model.weight.untyped_storage().nbytes() == 0
