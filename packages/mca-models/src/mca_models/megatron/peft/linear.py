"""LoRA on one Megatron linear, and the communication of its two factors.

With ``x`` the linear's input and ``n`` tensor (for experts: expert-tensor) ranks, shapes on each rank:

    cut      base [rows, columns]   lora_A           h = A x    between                   lora_B
    rows     [out / n, in]          [r, in]          full       backward sums             [out / n, r]
      with sequence parallelism     x is [s / n]     [s / n]    gathered to [s]
    columns  [out, in / n]          [r, in / n]      partial    summed                    [out, r]
      with sequence parallelism                                 summed, scattered [s / n]
    none     [out, in]              [r, in]          full       nothing                   [out, r]

A replicated factor gets its full gradient in the backward pass, or, if each rank sees its own tokens, is marked
``sequence_parallel`` so that Megatron sums it once per step. Inside routed experts the token dispatcher gathers and
sums activations, so there only the gradients of replicated factors are summed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.nn.functional import dropout, linear

from mca_models.megatron.types import MarkedParameter, ShardedState

Axis = Literal["rows", "columns", "none"]


@dataclass(frozen=True)
class Cut:
    """Sharding of a base linear.

    Args:
        axis: Sharded axis of its weight ``[out, in]``.
        group: The group of its shards.
        sequence: Inputs (for a column-sharded one: outputs) are sharded along the sequence.
        expert: Whether it belongs to a routed expert.
        forked: It runs in a random state that ranks do not share, as all layers do with sequence parallelism.
    """

    axis: Axis
    group: ProcessGroup
    sequence: bool = False
    expert: bool = False
    forked: bool = False

    @property
    def many(self) -> bool:
        """Return whether there is more than one rank."""
        return bool(self.group.size() > 1)

    def between(self, h: Tensor) -> Tensor:
        """Convert this rank's ``A x`` to the input of its B."""
        from megatron.core import tensor_parallel as tp

        if not self.many or self.expert or self.axis == "none":
            return h
        result: Tensor
        if self.axis == "rows":
            move = (
                tp.gather_from_sequence_parallel_region
                if self.sequence
                else tp.copy_to_tensor_model_parallel_region
            )
            result = move(h, group=self.group)
        elif self.sequence:
            result = tp.reduce_scatter_to_sequence_parallel_region(h, group=self.group)
        else:
            result = tp.reduce_from_tensor_model_parallel_region(h, group=self.group)
        return result

    def summed(self, factor: Tensor) -> Tensor:
        """Return ``factor`` with its gradient summed over the ranks in the backward pass."""
        from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

        if not self.many:
            return factor
        result: Tensor = copy_to_tensor_model_parallel_region(factor, group=self.group)
        return result


@dataclass(frozen=True)
class LoraPart:
    """Adapter on one HF module inside a fused linear.

    Args:
        label: The module's last name.
        rank: Rank of the adapter.
        scale: Factor on the product.
        rows: Rows of lora_B on this rank.
        whole_b: lora_B is replicated, and the rank uses some of its rows.
    """

    label: str
    rank: int
    scale: float
    rows: int
    whole_b: bool = False


class LoraLinear(torch.nn.Module):
    """Sum of the parts' ``scale * B A x``, which is added to the output of one linear.

    Args:
        parts: The adapters, in the order of the fused rows.
        cut: Sharding of the base linear.
        base: The base weight, on this rank.
        order: For each output of the linear the index in the concatenated parts, one beyond the last for none;
            None: the concatenation is in order.
        p: Dropout probability of each part's input.
    """

    order: Tensor | None

    def __init__(
        self, parts: Sequence[LoraPart], cut: Cut, base: Tensor, order: Tensor | None = None, p: float = 0.0
    ) -> None:
        super().__init__()
        self.parts, self.cut, self.p = tuple(parts), cut, p
        self.merged = False
        for part in self.parts:
            # parameters of this module, not of a child: Megatron waits for them when this module is called
            self.register_parameter(
                f"lora_A_{part.label}", Parameter(base.new_zeros(part.rank, base.shape[1]))
            )
            self.register_parameter(f"lora_B_{part.label}", Parameter(base.new_zeros(part.rows, part.rank)))
        self.register_buffer("order", order, persistent=False)
        self._mark(base)

    def _mark(self, base: Tensor) -> None:
        """Set the attributes by which Megatron sums gradients and counts parameters in norms."""
        sequence = self.cut.many and self.cut.sequence and not self.cut.expert
        for part in self.parts:
            a, b = self._factors(part)
            a_cut, b_cut = self.cut.axis == "columns", self.cut.axis == "rows" and not part.whole_b
            for factor, axis, cut, local in (
                (a, 1, a_cut, self.cut.axis != "columns"),
                (b, 0, b_cut, self.cut.axis != "rows"),
            ):
                marks: MarkedParameter = factor
                marks.allreduce = getattr(base, "allreduce", True)
                marks.sequence_parallel = sequence and local
                marks.tensor_model_parallel = cut
                marks.partition_dim, marks.partition_stride = (axis, 1) if cut else (-1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in]`` of the linear's input to ``[..., out]`` to add to its output."""
        deltas = [self._delta(part, x) for part in self.parts]
        return self._ordered(deltas, -1)

    def _delta(self, part: LoraPart, x: Tensor) -> Tensor:
        a, b = self._factors(part)
        if self.cut.expert and self.cut.axis == "rows":
            a = self.cut.summed(a)
        if part.whole_b or (self.cut.expert and self.cut.axis == "columns"):
            b = self.cut.summed(b)
        # scale the tensor with few channels
        return linear(self.cut.between(linear(self._dropped(x), a)) * part.scale, b)

    def _dropped(self, x: Tensor) -> Tensor:
        if not self.p or not self.training:
            return x
        same = self.cut.axis != "columns" and not self.cut.sequence
        if same or self.cut.forked or not self.cut.many:
            return dropout(x, self.p)  # a fork inside a fork draws other numbers when the layer is recomputed
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        with get_cuda_rng_tracker().fork():  # each rank has its own tokens or features
            return dropout(x, self.p)

    def _ordered(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        if self.order is None:
            return parts[0] if len(parts) == 1 else torch.cat(list(parts), axis)
        size = list(parts[0].shape)
        size[axis] = 1
        return torch.cat([*parts, parts[0].new_zeros(size)], axis).index_select(axis, self.order)

    def product(self) -> Tensor:
        """Return the fp32 product that merging adds to the base weight on this rank."""
        return self._ordered([self._product(part) for part in self.parts], 0)

    def _product(self, part: LoraPart) -> Tensor:
        a, b = self._factors(part)
        return (b.float() @ a.float()) * part.scale

    def _factors(self, part: LoraPart) -> tuple[Tensor, Tensor]:
        return self.get_parameter(f"lora_A_{part.label}"), self.get_parameter(f"lora_B_{part.label}")

    def sharded_state_dict(self, *_: object, **__: object) -> ShardedState:
        """Return nothing: ``sharded_state`` adds the factors to the chunk's state."""
        return {}

    def factors(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield label, lora_A and lora_B of each part."""
        for part in self.parts:
            yield part.label, *self._factors(part)


class LoraWeight(LoraLinear):
    """Adapter on a bare weight: calling it with the weight returns the sum."""

    def forward(self, weight: Tensor) -> Tensor:
        """Map ``[out, in]`` to ``[out, in]``."""
        return (weight.float() + self.product()).to(weight.dtype)


class LoraExperts(torch.nn.Module):
    """LoRA on a grouped linear, whose input has the tokens of all experts of a rank in order.

    Args:
        experts: The adapter of each local expert that has one, by its local number.
        outputs: Output columns of the linear on this rank.
    """

    def __init__(self, experts: dict[int, LoraLinear], outputs: int) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleDict({str(number): lora for number, lora in experts.items()})
        self.outputs = outputs
        self.merged = False

    def forward(self, x: Tensor, splits: Sequence[int] | Tensor) -> Tensor:
        """Map as ``LoraLinear``; ``splits`` counts each expert's tokens."""
        counts = splits.tolist() if isinstance(splits, Tensor) else list(splits)
        deltas = []
        for number, tokens in enumerate(torch.split(x, counts)):
            key = str(number)
            if key in self.experts:
                deltas.append(self.experts[key](tokens))
            else:
                deltas.append(tokens.new_zeros(*tokens.shape[:-1], self.outputs))
        return torch.cat(deltas)

    def sharded_state_dict(self, *_: object, **__: object) -> ShardedState:
        """Return nothing, as ``LoraLinear``."""
        return {}
