"""Process groups of a world in which only one rank exists: its collectives are answered at once.

torch has such groups for its own tests. What Megatron asks of groups beside that (groups over gloo, objects gathered)
is answered here; nothing is sent.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from unittest.mock import patch

import torch
import torch.distributed as dist

from mca_train.types import Upstream


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """A block in which this process is ``rank`` of ``world_size``; no process group may stand before."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _answer_collectives()
    new_group = dist.new_group

    def fake_group(*args: Upstream, **options: Upstream) -> Upstream:
        return new_group(*args, **options | {"backend": "fake"})

    with ExitStack() as stack:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        stack.callback(_end)
        stack.enter_context(patch.object(dist, "new_group", fake_group))
        stack.enter_context(patch.object(dist, "all_gather_object", _same_of_all))
        stack.enter_context(patch.object(dist, "broadcast_object_list", _already_there))
        yield


def _answer_collectives() -> None:
    """Has collectives take tensors without memory, as they do by themselves after torch 2.8."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"):
        import_module("torch.distributed._tools.fake_collectives")


def _end() -> None:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _same_of_all(found: list[Upstream], value: object, group: object = None) -> None:
    found[:] = [value] * len(found)


def _already_there(*_: object, **__: object) -> None:
    """What a rank has is what the source has."""


@contextmanager
def moving_anew() -> Iterator[None]:
    """A block in which modules are moved by new parameters: those without memory cannot be exchanged in place."""

    def move(module: torch.nn.Module, *args: object, **__: object) -> torch.nn.Module:
        if args and isinstance(args[0], torch.device):
            _move(module, args[0])
        return module

    with patch.object(torch.nn.Module, "to", move):
        yield


def _move(module: torch.nn.Module, device: torch.device) -> None:
    """What is on another kind of device is made anew on ``device``; what was shared still is."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for owner in module.modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is None or tensor.device.type == device.type:
                    continue
                if tensor not in moved:
                    moved[tensor] = _on(tensor, device)
                tensors[name] = moved[tensor]  # type: ignore[assignment]


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = tensor.detach().to(device)
    if not isinstance(tensor, torch.nn.Parameter):
        return made
    parameter = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    marks = vars(tensor).keys() - vars(parameter).keys()  # Megatron's; not what fakes know of themselves
    vars(parameter).update({name: vars(tensor)[name] for name in marks})
    return parameter
