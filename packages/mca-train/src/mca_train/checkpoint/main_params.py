"""Main parameters, the fp32 copies of weights in half precision, where checkpoint or run has none.

An optimizer of weights in half precision holds them, and so does its checkpoint. A whole optimizer of fp32 weights has
none, for the weights are what they would be; nor has its checkpoint. A run that goes on in the other precision takes
the one for the other, so that nothing is rounded on the way.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mca_config.types import JsonObject
from mca_train.engine.offload import MASTER, is_precise
from mca_train.types import MegatronOptimizer, OptimizerState

PREFIX = "optimizer.state.fp32_param"
_WEIGHTS = "mca_weights"

Unrounded = Callable[[nn.Parameter], Tensor]
"""What a checkpoint's model has of this rank's piece of a parameter, in fp32."""


@dataclass(frozen=True)
class SavedWeights:
    """The model of a checkpoint, whose weights are in place in the dtype of the run.

    Attributes:
        read: Reads one as it was saved.
        in_fp32: All were saved so.
    """

    read: Unrounded
    in_fp32: bool


def ask_for_weights(optimizer: MegatronOptimizer, parts: Sequence[JsonObject], model: OptimizerState) -> None:
    """Adds to the state of every whole optimizer of fp32 weights the main parameters that would be its weights.

    Args:
        optimizer: Megatron's, whole or chained.
        parts: The states of its single optimizers.
        model: The sharded state of the model.
    """
    from megatron.core.dist_checkpointing import optimizer as sharding

    for part, params in _of_fp32(optimizer, parts):
        leaves = sharding.get_param_id_to_sharded_param_map(model, iter(params)) if params else {}
        part[_WEIGHTS] = {
            number: sharding.make_sharded_optimizer_tensor(leaf, params[number].detach(), PREFIX)
            for number, leaf in leaves.items()
        }


@torch.no_grad()
def take_weights(optimizer: MegatronOptimizer, parts: Sequence[JsonObject]) -> None:
    """Makes weights of the main parameters that were asked for and are there."""
    for part, params in _of_fp32(optimizer, parts):
        for number, found in part.pop(_WEIGHTS).items():
            if isinstance(found, Tensor):
                params[number].copy_(found)


def _of_fp32(
    optimizer: MegatronOptimizer, parts: Sequence[JsonObject]
) -> Iterator[tuple[JsonObject, list[nn.Parameter]]]:
    """The states of whole optimizers that hold no main parameters, and the weights of each in its order."""
    for part, single in zip(parts, _singles(optimizer), strict=True):
        if not hasattr(single, "gbuf_ranges") and not hasattr(single, "float16_groups"):
            groups = [] if single.optimizer is None else single.optimizer.param_groups
            yield part, [param for group in groups for param in group["params"]]


def fill(optimizer: MegatronOptimizer, parts: Sequence[JsonObject], unrounded: Unrounded) -> None:
    """Puts the checkpoint's weights in the place of main parameters that it has none of."""
    for part, single in zip(parts, _singles(optimizer), strict=True):
        if "param_state" in part:
            params = [param for buffer in single.buffers for param in buffer.param_index_map]
            for number, tensors in part["param_state"].items():
                for key in [key for key, found in tensors.items() if not isinstance(found, Tensor)]:
                    tensors[key] = _exact(params[number], unrounded)
        for found, params in zip(
            part.get("fp32_from_fp16_params", ()), getattr(single, "float16_groups", ()), strict=True
        ):
            missing = [place for place, value in enumerate(found) if not isinstance(value, Tensor)]
            for place in missing:
                found[place] = _exact(params[place], unrounded)


def _exact(param: nn.Parameter, unrounded: Unrounded) -> Tensor:
    """``param``, which the checkpoint's model may know more precisely."""
    return param.detach().clone() if param.dtype == torch.float32 else unrounded(param)


@torch.no_grad()
def take_beside_weights(optimizer: MegatronOptimizer) -> None:
    """Makes weights of what Transformer Engine's Adam has loaded beside those in fp32, which alone it updates."""
    for single in filter(is_precise, _singles(optimizer)):
        for group in single.optimizer.param_groups:
            for param in group["params"]:
                state = single.optimizer.state.get(param, {})
                if param.dtype == torch.float32 and MASTER in state:
                    param.copy_(state[MASTER])


def _singles(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    found: list[MegatronOptimizer] = getattr(optimizer, "chained_optimizers", [optimizer])
    return found
