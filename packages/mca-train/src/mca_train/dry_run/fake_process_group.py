"""Fake process groups, in which a single process is one rank of any world size.

They use torch's ``fake`` backend. Collectives that Megatron needs in addition (gloo groups, gathered objects) return at
once, and nothing is sent.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module

import torch
import torch.distributed as dist

from mca_config.errors import McaError
from mca_models.megatron.platform import replaced
from mca_train.types import Upstream


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Context in which this process is ``rank`` of ``world_size``; no process group may exist before."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _register_fake_collectives()
    new_group = dist.new_group

    def fake_group(*args: Upstream, **options: Upstream) -> Upstream:
        return new_group(*args, **options | {"backend": "fake"})

    with ExitStack() as stack:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        stack.callback(_end)
        stack.enter_context(replaced(dist, "new_group", fake_group))
        stack.enter_context(replaced(dist, "all_gather_object", _gather_same_object))
        stack.enter_context(replaced(dist, "broadcast_object_list", _skip_broadcast))
        yield


def _register_fake_collectives() -> None:
    """Register meta kernels of collectives, which torch after 2.8 has already."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"):
        import_module("torch.distributed._tools.fake_collectives")


def _end() -> None:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _gather_same_object(found: list[Upstream], value: object, group: object = None) -> None:
    found[:] = [value] * len(found)


def _skip_broadcast(*_: object, **__: object) -> None:
    """Do nothing: this rank's values are used in place of the source's."""


@contextmanager
def receive_known_shapes() -> Iterator[None]:
    """Context in which pipeline stages that ask for the shape of a message receive the shape of a real run.

    Megatron asks with ``variable_seq_lengths``, and if MTP layers are on another pipeline rank than the loss.
    """
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    ask, communicate = P2PCommunicator._communicate_shapes, P2PCommunicator._communicate
    shapes: list[Upstream] = []  # of the running call

    def answered(communicator: Upstream, *args: Upstream) -> Upstream:
        ask(communicator, *args)  # its messages count
        length, *rest = shapes[-1] or (0, 0, 0)  # None: nothing is received
        return tuple([length * parts, *rest] for parts in _received_parts(communicator))

    def communicated(communicator: Upstream, *, tensor_shape: Upstream, **options: Upstream) -> Upstream:
        shapes[:] = [tensor_shape]
        return communicate(communicator, tensor_shape=tensor_shape, **options)

    with (
        replaced(P2PCommunicator, "_communicate_shapes", answered),
        replaced(P2PCommunicator, "_communicate", communicated),
    ):
        yield


def _received_parts(communicator: Upstream) -> tuple[int, int]:
    """Return the number of hidden states in a message from the previous and in a gradient from the next stage.

    From the stage of MTP layers to that of the loss, they are those of the model and of each MTP layer.
    """
    from megatron.core.transformer.enums import LayerType

    config = communicator.config
    if not config.mtp_standalone:
        return 1, 1
    layout = config.pipeline_model_parallel_layout
    if config.virtual_pipeline_model_parallel_size is not None:
        raise McaError(
            f"pipeline_model_parallel_layout {layout.input_data!r}: with virtual stages, a dry run cannot have MTP "
            "layers (m) on another pipeline rank than the loss (L); move m into the stage of L, or remove --dry_run"
        )
    predicting = next(rank for rank, chunks in enumerate(layout.layout) if LayerType.mtp in chunks[-1])
    rank, parts = communicator.pp_group.rank(), 1 + config.mtp_num_layers
    return parts if rank > predicting else 1, parts if rank >= predicting else 1


@contextmanager
def replace_moved_parameters() -> Iterator[None]:
    """Context in which ``Module.to`` replaces parameters, as fake tensors cannot be swapped in place."""

    def move(module: torch.nn.Module, *args: object, **__: object) -> torch.nn.Module:
        if args and isinstance(args[0], torch.device):
            _move(module, args[0])
        return module

    with replaced(torch.nn.Module, "to", move):
        yield


def _move(module: torch.nn.Module, device: torch.device) -> None:
    """Replace tensors on other device types by copies on ``device``; shared tensors remain shared."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for owner in module.modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is None or tensor.device.type == device.type:
                    continue
                if tensor not in moved:
                    moved[tensor] = _copy_to(tensor, device)
                tensors[name] = moved[tensor]  # type: ignore[assignment]


def _copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = tensor.detach().to(device)
    if not isinstance(tensor, torch.nn.Parameter):
        return made
    parameter = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    marks = vars(tensor).keys() - vars(parameter).keys()  # Megatron's attributes, not those of fake tensors
    vars(parameter).update({name: vars(tensor)[name] for name in marks})
    return parameter
