"""Main parameters, the fp32 copies of half-precision weights, where checkpoint or run has none.

Optimizers of half-precision weights and their checkpoints hold main parameters. A non-distributed optimizer of fp32
weights has none, and neither has its checkpoint. A run that resumes in the other precision converts between weights and
main parameters without rounding.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from mca_config.types import JsonObject
from mca_train.engine.offload import MASTER, is_precision_aware
from mca_train.types import MegatronOptimizer, OptimizerState

PREFIX = "optimizer.state.fp32_param"
_WEIGHTS = "mca_weights"

ReadFp32 = Callable[[nn.Parameter], Tensor]
"""Function that reads this rank's shard of a parameter from a checkpoint, in fp32."""


def request_weights(optimizer: MegatronOptimizer, parts: Sequence[JsonObject], model: OptimizerState) -> None:
    """Add main parameters to the state of non-distributed fp32 optimizers, to be loaded as their weights.

    Args:
        optimizer: Megatron's, single or chained.
        parts: The states of its single optimizers.
        model: The sharded state of the model.
    """
    from megatron.core.dist_checkpointing import optimizer as sharding

    for part, params in _fp32_optimizers(optimizer, parts):
        leaves = sharding.get_param_id_to_sharded_param_map(model, iter(params)) if params else {}
        part[_WEIGHTS] = {
            number: sharding.make_sharded_optimizer_tensor(leaf, params[number].detach(), PREFIX)
            for number, leaf in leaves.items()
        }


@torch.no_grad()
def copy_into_weights(optimizer: MegatronOptimizer, parts: Sequence[JsonObject]) -> None:
    """Copy the loaded main parameters of `request_weights` into the weights."""
    for part, params in _fp32_optimizers(optimizer, parts):
        for number, value in part.pop(_WEIGHTS).items():
            if isinstance(value, Tensor):
                params[number].copy_(value)


def _fp32_optimizers(
    optimizer: MegatronOptimizer, parts: Sequence[JsonObject]
) -> Iterator[tuple[JsonObject, list[nn.Parameter]]]:
    """Yield the states of non-distributed optimizers without main parameters, and their weights in order."""
    for part, single in zip(parts, _singles(optimizer), strict=True):
        if not hasattr(single, "gbuf_ranges") and not hasattr(single, "float16_groups"):
            groups = [] if single.optimizer is None else single.optimizer.param_groups
            yield part, [param for group in groups for param in group["params"]]


def fill_missing(optimizer: MegatronOptimizer, parts: Sequence[JsonObject], read_fp32: ReadFp32) -> None:
    """Replace main parameters that the checkpoint lacks by its weights."""
    for part, single in zip(parts, _singles(optimizer), strict=True):
        if "param_state" in part:
            params = [param for buffer in single.buffers for param in buffer.param_index_map]
            for number, tensors in part["param_state"].items():
                for key in [key for key, value in tensors.items() if not isinstance(value, Tensor)]:
                    tensors[key] = _fp32_value(params[number], read_fp32)
        for values, params in zip(
            part.get("fp32_from_fp16_params", ()), getattr(single, "float16_groups", ()), strict=True
        ):
            missing = [index for index, value in enumerate(values) if not isinstance(value, Tensor)]
            for index in missing:
                values[index] = _fp32_value(params[index], read_fp32)


def _fp32_value(param: nn.Parameter, read_fp32: ReadFp32) -> Tensor:
    """Return ``param`` in fp32, read from the checkpoint if its saved precision is higher."""
    return param.detach().clone() if param.dtype == torch.float32 else read_fp32(param)


@torch.no_grad()
def copy_te_main_params(optimizer: MegatronOptimizer) -> None:
    """Copy the main parameters loaded into Transformer Engine's Adam into fp32 weights, which it updates directly."""
    for single in filter(is_precision_aware, _singles(optimizer)):
        for group in single.optimizer.param_groups:
            for param in group["params"]:
                state = single.optimizer.state.get(param, {})
                if param.dtype == torch.float32 and MASTER in state:
                    param.copy_(state[MASTER])


def _singles(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    singles: list[MegatronOptimizer] = getattr(optimizer, "chained_optimizers", [optimizer])
    return singles
