"""Attach LoRA to the linears of live chunks, without changing their classes or names.

The factors become a child module ``lora`` of the linear (``...linear_qkv.lora.lora_A_q_proj``), and a forward hook
adds their output. A bare weight (the router's, the shared experts' gate) has no linear; while its module runs, the
weight with the adapter merged in replaces it. The position and parts of a linear are known from the rules; classes
are not inspected.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from mca_config.errors import McaError
from mca_models.lora.rules import AdapterRules, LoraFactors, factors_by_weight
from mca_models.megatron.features.media import mark_replicated_gradient
from mca_models.megatron.names import LocalParam
from mca_models.megatron.peft.linear import Axis, Cut, LoraExperts, LoraLinear, LoraPart, LoraWeight
from mca_models.megatron.tensors import cast_finite
from mca_models.megatron.types import HookOutput, MegatronModule
from mca_models.storage.copy_plan import HF, Rule, part_shapes
from mca_models.weights import Param, Stage

logger = logging.getLogger(__name__)

CHILD = "lora"
_BARE = (".router.weight", ".gate_weight")
_FULL_SEQUENCE = ".x_proj.weight"
_AXES: Mapping[int | None, Axis] = {0: "rows", 1: "columns", None: "none"}

Switch = LoraLinear | LoraExperts


@dataclass(frozen=True)
class LinearGroups:
    """Process groups and settings of the live linears.

    Args:
        tensor: The tensor-parallel group.
        expert: The expert-tensor-parallel group.
        sequence_parallel: Whether dense activations are sharded along the sequence.
        overlap: Shared experts overlap with the dispatcher, which bypasses hooks.
        fuser: Transformer Engine fuses whole MLPs into one operation, which bypasses hooks.
    """

    tensor: ProcessGroup
    expert: ProcessGroup
    sequence_parallel: bool
    overlap: bool = False
    fuser: bool = False

    def cut(self, param: Param) -> Cut:
        """Return the sharding of the weight of ``param``."""
        expert = param.expert is not None
        group = self.expert if expert else self.tensor
        # the full sequence on each rank
        whole = expert or param.stage is Stage.VISION or param.mca.endswith(_FULL_SEQUENCE)
        return Cut(
            _AXES[param.shard.axis],
            group,
            sequence=self.sequence_parallel and not whole,
            expert=expert,
            forked=self.sequence_parallel and param.stage is Stage.LAYER,
        )


@dataclass(frozen=True)
class Attached:
    """LoRA on one base weight of this rank.

    Args:
        base: The base weight.
        name: Its canonical name.
        lora: The factors on it.
        owner: The linear.
        live: Rule and live tensor of every factor.
        switch: The module whose ``merged`` disables the hooks.
        handles: Handles that remove the hooks.
    """

    base: Tensor
    name: str
    lora: LoraLinear
    owner: torch.nn.Module
    live: tuple[tuple[Param, Tensor], ...]
    switch: Switch
    handles: tuple[RemovableHandle, ...]

    def folded(self) -> Tensor:
        """Return the base weight plus the factors' product: computed in fp32, in its dtype."""
        return cast_finite(self.base.float() + self.lora.product(), self.base.dtype, self.name)


def attach(
    chunk: torch.nn.Module,
    params: Sequence[tuple[LocalParam, Tensor]],
    rules: AdapterRules,
    ranks: LinearGroups,
    *,
    dropout: float,
    grouped: bool,
) -> Iterator[Attached]:
    """Attach the adapters of ``rules`` to the linears of ``chunk``, and yield each.

    Args:
        chunk: One live ``GPTModel``.
        params: Its parameters.
        rules: The adapter, made for the live layout.
        ranks: Process groups of the linears.
        dropout: Dropout probability of the adapters' inputs.
        grouped: One module has all experts of a rank.

    Raises:
        McaError: A target does not support an adapter on this layout.
    """
    factors_by_part = factors_by_weight(rules.factors)
    experts: dict[str, list[_Placed]] = {}
    for item, base in params:
        pairs = factors_by_part.get(item.param.mca_name())
        if not pairs or item.copy:
            continue
        path, _, leaf = item.live.rpartition(".")
        placed = _Placed(pairs, base, _lora(pairs, base, ranks, dropout))
        if grouped and item.param.expert is not None:
            experts.setdefault(path, []).append(placed)
        elif pairs[0].target.is_vision:
            yield _attach_hf_module(chunk.get_submodule(path), placed, ranks.sequence_parallel)
        elif item.param.mca.endswith(_BARE):
            yield _attach_weight(chunk.get_submodule(path), leaf, placed)
        else:
            yield _attach_linear(chunk.get_submodule(path), placed)
    for path, several in experts.items():
        yield from _attach_grouped(chunk.get_submodule(path), several)


def warn_unused_dropout(rules: AdapterRules, dropout: float) -> None:
    """Warn of adapters without dropout: they are added to a weight and have no input."""
    targets = [pair.target for pair in rules.factors]
    bare = sorted({target.module.rpartition(".")[2] for target in targets if target.base.mca.endswith(_BARE)})
    if dropout and bare:
        logger.warning(
            "lora_dropout: not applied to %s, whose adapters are added to a weight and have no input",
            ", ".join(bare),
        )


@dataclass(frozen=True)
class _Placed:
    pairs: Sequence[LoraFactors]
    base: Tensor
    lora: LoraLinear

    def attached(
        self, owner: torch.nn.Module, switch: Switch, handles: Sequence[RemovableHandle]
    ) -> Attached:
        factors = {label: (a, b) for label, a, b in self.lora.factors()}
        both = [(pair, factors[pair.target.label]) for pair in self.pairs]
        name = self.pairs[0].target.base.mca_name()
        live = tuple(item for pair, (a, b) in both for item in ((pair.a, a), (pair.b, b)))
        return Attached(self.base, name, self.lora, owner, live, switch, tuple(handles))


def _lora(pairs: Sequence[LoraFactors], base: Tensor, ranks: LinearGroups, dropout: float) -> LoraLinear:
    param = pairs[0].target.base
    module = pairs[0].target.module
    for name, on in (
        ("moe_shared_expert_overlap", ranks.overlap and ".shared_experts." in param.mca),
        ("use_transformer_engine_op_fuser", ranks.fuser and ".mlp." in param.mca),
    ):
        if on:
            raise McaError(
                f"target_modules: an adapter on {module} is not supported with {name}; set that to false or exclude it"
            )
    cut = ranks.cut(param)
    if cut.many and not cut.sequence and param.mca.endswith("linear_kv_down_proj.weight"):
        raise McaError(
            f"target_modules: an adapter on {module} needs sequence_parallel at "
            "tensor_model_parallel_size above 1; set it, or exclude the module"
        )
    sizes = _part_rows(param, base, cut)
    parts = []
    for pair in pairs:
        whole_b = cut.axis == "rows" and pair.b.shard.axis is None
        rows = sizes[pair.target.part]
        share = rows // cut.group.size() if cut.axis == "rows" and not whole_b else rows
        parts.append(LoraPart(pair.target.label, pair.rank, pair.scale, share, whole_b))
    order = None if len(param.hf) == 1 else _order(pairs, parts, sizes, cut)
    if order is not None:
        order = order.to(base.device)
    kind = LoraWeight if param.mca.endswith(_BARE) else LoraLinear
    return kind(parts, cut, base, order, dropout)


def _part_rows(param: Param, base: Tensor, cut: Cut) -> tuple[int, ...]:
    """Return the rows of each HF tensor inside the full weight."""
    rows = base.shape[0] * (cut.group.size() if cut.axis == "rows" else 1)
    if len(param.hf) == 1:
        return (rows,)
    return tuple(shape[0] for shape in part_shapes(Rule.from_param(param), (rows, 2), HF))


def _order(
    pairs: Sequence[LoraFactors], parts: Sequence[LoraPart], sizes: tuple[int, ...], cut: Cut
) -> Tensor | None:
    """Return the index in the concatenated parts of each output of the fused linear on this rank."""
    param = pairs[0].target.base
    rows = _packed_rows(Rule.from_param(param), sizes, cut.group.rank(), cut.group.size())
    parts_by_number = {pair.target.part: part for pair, part in zip(pairs, parts, strict=True)}
    nothing = sum(part.rows for part in parts)
    first_row, start, order = 0, 0, np.full_like(rows, nothing)
    for number, size in enumerate(sizes):
        if part := parts_by_number.get(number):
            shared = part.whole_b or cut.axis != "rows"
            first = first_row if shared else first_row + cut.group.rank() * part.rows
            selected = (rows >= first_row) & (rows < first_row + size)
            order[selected] = rows[selected] - first + start
            start += part.rows
        first_row += size
    return None if np.array_equal(order, np.arange(nothing)) else torch.from_numpy(order)


@lru_cache(maxsize=64)
def _packed_rows(rule: Rule, sizes: tuple[int, ...], rank: int, size: int) -> NDArray[np.int64]:
    """Return the rows of the HF tensors, numbered over all of them, in the order of ``rank``."""
    numbers = np.arange(sum(sizes)).reshape(-1, 1)
    whole = rule.to_full(np.split(numbers, np.cumsum(sizes)[:-1]))
    packed: NDArray[np.int64] = rule.shard.take(whole, rank, size).flatten()
    return packed


def _attach_linear(owner: torch.nn.Module, placed: _Placed) -> Attached:
    owner.add_module(CHILD, placed.lora)
    _return_normed_input(owner)
    # before other hooks on the output, e.g. the factor and cap of the logits
    handle = owner.register_forward_hook(_add, prepend=True)
    return placed.attached(owner, placed.lora, [handle])


def _attach_hf_module(owner: torch.nn.Module, placed: _Placed, sequence_parallel: bool) -> Attached:
    """Attach to a module of transformers, which returns its output only; gradients as in the vision tower."""
    owner.add_module(CHILD, placed.lora)
    for _, *factors in placed.lora.factors():
        for factor in factors:
            mark_replicated_gradient(factor, sequence_parallel=sequence_parallel)
    return placed.attached(owner, placed.lora, [owner.register_forward_hook(_add_whole)])


def _attach_weight(owner: torch.nn.Module, leaf: str, placed: _Placed) -> Attached:
    lora = placed.lora

    def put(module: torch.nn.Module, args: tuple[object, ...]) -> None:
        if not lora.merged:  # an instance attribute shadows the parameter
            vars(module)[leaf] = lora(placed.base)

    def take(module: torch.nn.Module, args: tuple[object, ...], output: HookOutput) -> None:
        vars(module).pop(leaf, None)

    owner.add_module(CHILD, lora)
    handles = [owner.register_forward_pre_hook(put), owner.register_forward_hook(take, always_call=True)]
    return placed.attached(owner, lora, handles)


def _attach_grouped(owner: torch.nn.Module, placed: Sequence[_Placed]) -> Iterator[Attached]:
    number = {id(tensor): int(name.removeprefix("weight")) for name, tensor in _weights(owner)}
    switch = LoraExperts({number[id(item.base)]: item.lora for item in placed}, placed[0].base.shape[0])
    owner.add_module(CHILD, switch)
    handles = [owner.register_forward_hook(_add_grouped)]
    for item in placed:
        yield item.attached(owner, switch, handles)


def _weights(owner: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, p) for name, p in owner.named_parameters(recurse=False) if name.startswith("weight"))


def _return_normed_input(owner: MegatronModule) -> None:
    """Make Transformer Engine's fused norm-and-linear also return the norm's output, LoRA's input."""
    if "return_layernorm_output" in vars(owner):
        owner.return_layernorm_output = True


def _add(owner: MegatronModule, args: tuple[Tensor, ...], output: HookOutput) -> HookOutput:
    """Forward hook: ``(y, bias)``, ``((y, x), bias)`` or ``(y, bias, x)`` to ``(y + lora(x), bias)``."""
    first, *rest = output
    y, x = first if isinstance(first, tuple) else (first, rest[1] if len(rest) == 2 else args[0])
    lora: LoraLinear = owner.lora
    return (y if lora.merged else y + lora(x)), rest[0]


def _add_whole(owner: MegatronModule, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    lora: LoraLinear = owner.lora
    return output if lora.merged else output + lora(args[0])


def _add_grouped(owner: MegatronModule, args: tuple[Tensor, ...], output: HookOutput) -> HookOutput:
    y, bias = output
    lora: LoraExperts = owner.lora
    return (y if lora.merged else y + lora(args[0], args[1])), bias


def detach(items: Sequence[Attached]) -> None:
    """Remove the adapters."""
    for item in items:
        for handle in item.handles:
            handle.remove()
        if CHILD in dict(item.owner.named_children()):
            delattr(item.owner, CHILD)
        if "return_layernorm_output" in vars(item.owner):
            item.owner.return_layernorm_output = False  # type: ignore[assignment]


def begin_gradients(chunk: torch.nn.Module) -> Iterator[RemovableHandle]:
    """Require gradients of the frozen embedding's output.

    Otherwise recomputed layers and the first pipeline stage have none.
    """
    if (embedding := dict(chunk.named_children()).get("embedding")) is not None:
        yield embedding.register_forward_hook(_require_grad)


def _require_grad(module: torch.nn.Module, args: tuple[object, ...], output: Tensor) -> None:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)
