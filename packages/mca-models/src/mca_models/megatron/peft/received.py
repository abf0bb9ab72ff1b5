"""Receive an adapter as tensors under PEFT's names, in any order and in pieces; each rank keeps all of it."""

from collections.abc import Callable, Iterable

from torch import Tensor

from mca_models.lora import Adapter
from mca_models.lora.peft_directory import PeftReader, peft_shapes
from mca_models.megatron.state.weight_receiver import Weight, WeightReceiver, receive_all
from mca_models.megatron.tensors import to_numpy
from mca_models.weights import Param
from mca_models.weights.arrays import Array


def receive_adapter(adapter: Adapter, weights: Iterable[Weight]) -> Callable[[Param], Array]:
    """Return a function that reads the full tensor of a rule of ``adapter`` from ``weights``.

    Args:
        adapter: The adapter, whose rules give the expected tensors.
        weights: Names and tensors.

    Raises:
        McaError: Names are missing or unexpected, or a shape differs.
    """
    tensors: dict[str, Tensor] = {}
    receiver = WeightReceiver(peft_shapes(adapter), {})

    def receive(name: str, tensor: Tensor, start: int | None) -> None:
        whole = receiver.receive(name, tensor, start)
        if whole is not None:
            tensors[name] = whole.detach().cpu().clone()

    receive_all(weights, receive)
    receiver.finish()
    stacks = PeftReader(lambda name: to_numpy(tensors[name]), adapter.model.num_moe_experts or 1)
    return stacks.read
