"""Optimizer state in one form for every layout and every kind of Megatron optimizer.

Megatron's own optimizer checkpoint keeps the structure of the object that wrote it: chained only with expert
parallelism, main parameters only in mixed precision, nested differently with a distributed optimizer. Another layout
cannot load it (megatron-core 0.16.1 and 0.19.2: KeyError 'optimizer' between expert sizes 1 and 2). The tensors inside
have the same global names everywhere: ``optimizer.state.exp_avg.decoder.layers...``. This module saves only those
tensors under their global names, and the few scalars separately (`Numbers`). Loading requests the tensors of the *new*
optimizer.

Main parameters are the fp32 copies of half-precision weights. A non-distributed optimizer of fp32 weights has none, and
neither has its checkpoint. A run that resumes in the other precision converts between weights and main parameters
without rounding.
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from mca_config.errors import McaError
from mca_config.types import JsonObject, Typed
from mca_models.megatron.distributed.collectives import all_gather
from mca_models.megatron.distributed.reader import read_state, shapes_in
from mca_models.megatron.distributed.writer import PendingWrite, write_state
from mca_models.torch_checkpoint.storage_forms import global_spellings
from mca_train import groups
from mca_train.checkpoint.distributed_optimizer import per_parameter_states
from mca_train.engine.offload import MASTER, as_adam, init_precision_aware_state, is_precision_aware, singles
from mca_train.types import Chunk, MegatronOptimizer, OptimizerState

PREFIX = "optimizer.state.fp32_param"
_WEIGHTS = "mca_weights"

ReadFp32 = Callable[[nn.Parameter], Tensor]
"""Function that reads this rank's shard of a parameter from a checkpoint, in fp32."""
_MAIN_PARAM = f"{PREFIX}."
_MAIN_PARAM_IF_SPLIT = "optimizer.state.param."
_KIND = re.compile(r"optimizer\.state\.(?!fp32_param\.)(\w+)\.")


@dataclass(frozen=True)
class Numbers:
    """Scalars of an optimizer's state."""

    step: float | None
    grad_scaler: JsonObject | None
    optimizer: str = ""
    """``adam``, ``sgd`` or ``muon``."""


def save(
    optimizer: MegatronOptimizer, chunks: list[Chunk], folder: Path, *, background: bool
) -> tuple[Numbers, PendingWrite]:
    """Start writing the tensors into the existing, empty ``folder``; collective.

    Returns:
        The scalars, which the caller saves, and the pending writes.
    """
    with as_adam(optimizer, loading=False):
        state = _sharded(optimizer, chunks, loading=False)
    leaves = {str(number): leaf for number, (_, _, leaf) in enumerate(_leaves(state))}
    return _max_step(_numbers(state)), write_state(leaves, folder, background=background)


def load(
    optimizer: MegatronOptimizer, chunks: list[Chunk], folder: Path, numbers: Numbers, read_weight: ReadFp32
) -> None:
    """Restore the result of `save`, written on any layout; collective. The weights are loaded already.

    Args:
        optimizer: Megatron's.
        chunks: The model.
        folder: Written by `save`.
        numbers: Returned by `save`.
        read_weight: Reads a weight of the same checkpoint.

    Raises:
        McaError: The checkpoint has no state for a parameter (another optimizer or another model wrote it).
    """
    with as_adam(optimizer, loading=True):
        _load(optimizer, chunks, folder, numbers, read_weight)


def _load(
    optimizer: MegatronOptimizer, chunks: list[Chunk], folder: Path, numbers: Numbers, read_weight: ReadFp32
) -> None:
    saved = shapes_in(folder)
    state = _sharded(optimizer, chunks, loading=True)
    _require_same_kind(folder, _kinds(saved), state)
    counting = [_counts_steps(part) for part in _parts(state)]
    _use_saved_keys(state, saved)
    requested, absent = {}, []
    for number, (_, key, leaf) in enumerate(_leaves(state)):
        if all(key in saved for key in _keys(leaf)):
            requested[str(number)] = leaf
        elif not leaf.key.startswith(_MAIN_PARAM):
            absent.append(f"'{leaf.key.removeprefix('optimizer.state.')}' ({key})")
    _reject_absent(folder, absent)
    loaded = read_state(requested, folder) if any(all_gather(len(requested))) else {}
    for number, (container, key, leaf) in enumerate(list(_leaves(state))):
        if str(number) in requested:
            container[key] = _without_padding(loaded[str(number)], leaf, saved.get(leaf.key, ()))
    copy_into_weights(optimizer, _parts(state))
    fill_missing(optimizer, _parts(state), read_weight)
    numbers = replace(numbers, grad_scaler=_clamp_scaler(numbers.grad_scaler, optimizer))
    _put_numbers(state, numbers, counting)
    optimizer.load_state_dict(_unwrap_local_objects(state))
    copy_te_main_params(optimizer)


def _sharded(optimizer: MegatronOptimizer, chunks: list[Chunk], *, loading: bool) -> OptimizerState:
    """Return the sharded state; layers have separate tensors, as untrained ones would leave gaps in stacked tensors."""
    metadata = {
        "non_homogeneous_layers": True,
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": groups.data_group_with_context(),
    }
    model = {
        f"model{number}": chunk.sharded_state_dict(metadata=metadata) for number, chunk in enumerate(chunks)
    }
    for single in singles(optimizer):
        if single.init_state_fn is None:  # of sgd
            single.init_state_fn = _begin_momentum
        if not loading and not single.optimizer.state:  # fp16: every step so far was skipped
            begin = init_precision_aware_state if is_precision_aware(single) else single.init_state_fn
            begin(single.optimizer, single.config)
    with per_parameter_states(optimizer):
        state = optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    for _, _, leaf in _leaves(state):
        if leaf.key.startswith(_MAIN_PARAM_IF_SPLIT):
            leaf.key = _MAIN_PARAM + leaf.key.removeprefix(_MAIN_PARAM_IF_SPLIT)
    if loading:
        request_weights(optimizer, _parts(state), model)
    return state


def _use_saved_keys(state: OptimizerState, saved: Container[str]) -> None:
    """Rename keys to their spelling in the checkpoint, which differs between versions of Megatron."""
    for _, _, leaf in _leaves(state):
        leaf.key = next((key for key in global_spellings(leaf.key) if key in saved), leaf.key)


def _begin_momentum(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Create zero momentum buffers for SGD to load into."""
    for group in optimizer.param_groups:
        for param in group["params"] if group.get("momentum") else ():
            optimizer.state[param].setdefault("momentum_buffer", torch.zeros_like(param))


def _require_same_kind(folder: Path, saved: set[str], state: OptimizerState) -> None:
    """Raise unless this optimizer has the same per-parameter states as the checkpoint; collective."""
    local = all_gather(_kinds(leaf.key for _, _, leaf in _leaves(state)))
    current, written = sorted(set().union(*local)), sorted(saved)
    if current != written:
        raise McaError(
            f"{folder}: was written by an optimizer that keeps {' and '.join(written) or 'nothing'} of each parameter, "
            f"this run's keeps {' and '.join(current) or 'nothing'}; resume with the optimizer that it was written with"
        )


def _reject_absent(folder: Path, absent: list[str]) -> None:
    """Raise on all ranks if any rank finds no state for a parameter; collective."""
    if missing := [name for names in all_gather(absent) for name in names]:
        raise McaError(
            f"{folder}: holds no {missing[0]}; it was written with another optimizer or another model, training "
            "cannot resume with this one"
        )


def _kinds(keys: Iterable[str]) -> set[str]:
    """Return the kinds of per-parameter states except main parameters: ``exp_avg``, ``momentum_buffer``, ..."""
    return {match[1] for key in keys if (match := _KIND.match(key))}


def _leaves(state: OptimizerState) -> Iterator[tuple[OptimizerState, Typed, OptimizerState]]:
    """Yield ``(container, key, leaf)`` of every sharded tensor in a nested state, in a fixed order."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    items: Iterable[tuple[Typed, OptimizerState]] = ()
    if isinstance(state, dict):
        items = list(state.items())
    elif isinstance(state, list):
        items = list(enumerate(state))
    for key, value in items:
        if isinstance(value, (ShardedTensor, ShardedTensorFactory)):
            yield state, key, value
        else:
            yield from _leaves(value)


def _keys(leaf: OptimizerState) -> set[str]:
    """Return the checkpoint's keys of a leaf: a gated delta net's projection is stored as several tensors."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    if not isinstance(leaf, ShardedTensorFactory):
        return {leaf.key}
    return {part.key for _, _, part in _leaves({leaf.key: leaf.build()})}


def _parts(state: OptimizerState) -> list[JsonObject]:
    """Return the states of the single optimizers; a chained state has integer keys."""
    return list(state.values()) if state and all(isinstance(key, int) for key in state) else [state]


def _param_groups(part: JsonObject) -> list[JsonObject]:
    inner = part.get("optimizer", part)
    groups_: list[JsonObject] = inner.get("param_groups", [])
    return groups_


def _numbers(state: OptimizerState) -> Numbers:
    step, scaler = None, None
    for part in _parts(state):
        scaler = part.get("grad_scaler", scaler)
        steps = [group["step"] for group in _param_groups(part) if "step" in group]
        common = part.get("optimizer", part).get("state", {}).get("common_step")
        steps += [] if common is None else [common]
        step = max([*steps, *([] if step is None else [step])], default=None)
    return Numbers(None if step is None else float(step), scaler)


def _max_step(numbers: Numbers) -> Numbers:
    """Take the largest step of all ranks: a pipeline stage without trained parameters has none. Collective."""
    steps = [step for step in all_gather(numbers.step) if step is not None]
    return replace(numbers, step=max(steps, default=None))


def _counts_steps(part: JsonObject) -> bool:
    """Return True if a state that is not loaded yet is Adam's, or empty: Muon and SGD count no steps."""
    kinds = _kinds(leaf.key for _, _, leaf in _leaves(part))
    return not kinds or "exp_avg" in kinds


def _put_numbers(state: OptimizerState, numbers: Numbers, counting: Sequence[bool]) -> None:
    for part, counts in zip(_parts(state), counting, strict=True):
        if numbers.grad_scaler and "grad_scaler" in part:  # a constant loss scale has no state
            part["grad_scaler"] = _as_tensors(numbers.grad_scaler, part["grad_scaler"])
        if not counts:
            continue
        if numbers.step is None:  # saved before the first step
            for group in _param_groups(part):
                group.pop("step", None)
            continue
        inner = part.get("optimizer", part)
        if "common_step" in inner.get("state", {}):
            inner["state"]["common_step"] = torch.tensor(numbers.step)
        for group in _param_groups(part):
            group["step"] = int(numbers.step)


def _clamp_scaler(saved: JsonObject | None, optimizer: MegatronOptimizer) -> JsonObject | None:
    """Return the loss scaler's numbers, with counts within this run's settings.

    Megatron doubles the scale when the count equals the window; a count above it would never match.
    """
    scalers = [getattr(single, "grad_scaler", None) for single in singles(optimizer)]
    dynamic = next((scaler for scaler in scalers if hasattr(scaler, "growth_interval")), None)
    if not saved or dynamic is None:
        return saved
    most = {"growth_tracker": int(dynamic.growth_interval) - 1, "hysteresis_tracker": dynamic.hysteresis}
    return saved | {name: min(saved[name], limit) for name, limit in most.items()}


def _as_tensors(saved: JsonObject, present: JsonObject) -> JsonObject:
    """Convert JSON numbers to the tensors of Megatron's loss scaler."""
    return {
        key: torch.as_tensor(value, dtype=present[key].dtype).reshape(present[key].shape)
        if isinstance(present.get(key), torch.Tensor)
        else value
        for key, value in saved.items()
    }


def _without_padding(tensor: Tensor, leaf: OptimizerState, saved: tuple[int, ...]) -> OptimizerState:
    """Zero the padded vocabulary rows that the checkpoint, padded for fewer tensor ranks, lacks."""
    if getattr(leaf, "allow_shape_mismatch", False) and isinstance(tensor, torch.Tensor):
        axis = leaf.prepend_axis_num
        known = saved[axis] - leaf.global_offset[axis]
        tensor[max(known, 0) :] = 0
    return tensor


def _unwrap_local_objects(state: OptimizerState) -> OptimizerState:
    """Unwrap local objects, as Megatron's ``load_state_dict`` expects."""
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

    unwrap: Callable[[OptimizerState], OptimizerState] = _unwrap_local_objects
    if isinstance(state, LocalNonpersistentObject):
        return state.unwrap()
    if isinstance(state, dict):
        return {key: unwrap(value) for key, value in state.items()}
    if isinstance(state, list):
        return [unwrap(value) for value in state]
    return state


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
    for part, single in zip(parts, singles(optimizer), strict=True):
        if not hasattr(single, "gbuf_ranges") and not hasattr(single, "float16_groups"):
            groups = [] if single.optimizer is None else single.optimizer.param_groups
            yield part, [param for group in groups for param in group["params"]]


def fill_missing(optimizer: MegatronOptimizer, parts: Sequence[JsonObject], read_fp32: ReadFp32) -> None:
    """Replace main parameters that the checkpoint lacks by its weights."""
    for part, single in zip(parts, singles(optimizer), strict=True):
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
    for single in filter(is_precision_aware, singles(optimizer)):
        for group in single.optimizer.param_groups:
            for param in group["params"]:
                state = single.optimizer.state.get(param, {})
                if param.dtype == torch.float32 and MASTER in state:
                    param.copy_(state[MASTER])
