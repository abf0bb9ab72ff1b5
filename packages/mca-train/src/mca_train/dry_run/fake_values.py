"""Known values of fake tensors, for the values that the host reads.

The lengths of packed sequences and the routing to experts are known, and so are all values computed from these alone,
except large floating-point tables such as RoPE angles. All other values are 1 or True: they are norms, scales and flags
that do not affect sizes.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from mca_train.types import Upstream

_COALESCED = (
    torch.ops.c10d.reduce_scatter_tensor_coalesced_.default,
    torch.ops.c10d.allgather_into_tensor_coalesced_.default,
    torch.ops.c10d.allreduce_coalesced_.default,
)
"""Coalesced collectives, which have no fake implementation in torch."""
_MAX_FLOAT_VALUES = 4096
"""Maximum size of a floating-point tensor whose values are kept."""
_HOST = torch.device("cpu")
"""Device of the known values, for tensors on any device."""


class FakeValues(TorchDispatchMode):
    """Dispatch mode above ``fake`` that computes the values that fake tensors lack."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake
        self._known: Any = WeakTensorKeyDictionary()

    def to_fake(self, tensor: torch.Tensor, *, known: bool) -> torch.Tensor:
        """Return a fake copy of ``tensor``; with ``known`` its values are kept."""
        made: torch.Tensor = self._fake.from_tensor(tensor)
        if known:
            self._known[made] = tensor
        return made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run ``func``, or return its known result."""
        options = dict(kwargs or {})
        if func in _COALESCED:
            from torch._C._distributed_c10d import FakeWork

            return FakeWork().boxed()
        if func is torch.ops.aten.masked_select.default and args[1] in self._known:
            with _disable_current_modes():
                count = int(self._known[args[1]].expand(args[0].shape).sum())
            return args[0].new_empty(count)
        if func is torch.ops.aten.lift_fresh.default and type(args[0]) is torch.Tensor:
            return self.to_fake(args[0], known=True)  # a constant of the host
        values = self._compute(func, args, options)
        if func is torch.ops.aten._local_scalar_dense.default:
            return _default_value(args[0].dtype) if values is None else values
        try:
            out = func(*args, **options)
        except DynamicOutputShapeException:
            if values is None and func is torch.ops.aten.index.Tensor:
                return func(args[0], [row for index in args[1] for row in self._all_rows(index)])
            if values is None:
                raise
            device = args[0].device
            return _pytree.tree_map_only(torch.Tensor, lambda value: self._make_fake(value, device), values)
        if func is torch.ops.c10d._allgather_base_.default:
            self._remember_all_gather(args[0], args[1])
        elif values is not None:
            self._remember(out, values)
        return out

    def set_value(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Set the known values of ``tensor``."""
        self._known[tensor] = value

    def to_list(self, tensor: torch.Tensor) -> Any:
        """Return the known values of ``tensor`` as nested lists."""
        with _disable_current_modes():
            return self._known[tensor].tolist()

    def _compute(self, func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Return the result of ``func`` on known values; None if an input has unknown values."""
        valueless, mutable = _op_traits(func)
        if valueless:
            return None
        first = args[0] if args else None
        if not mutable and isinstance(first, torch.Tensor) and first not in self._known:
            return None
        tensors = [leaf for leaf in _pytree.tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]
        if mutable and not self._writes_known_numbers(func, tensors):
            for tensor in tensors:
                self._known.pop(tensor, None)
            return None
        if not tensors and not _makes_numbers(func, args):
            return None
        if not all(tensor in self._known for tensor in tensors):
            return None
        with _disable_current_modes():
            true_args, true_options = _pytree.tree_map_only(
                torch.Tensor, lambda tensor: self._known[tensor], (args, options)
            )
            if "device" in true_options:
                true_options["device"] = _HOST
            return func(*true_args, **true_options)

    def _writes_known_numbers(self, func: Upstream, tensors: Sequence[torch.Tensor]) -> bool:
        """Return True if ``func`` writes known numbers, such as lengths, into a tensor of known numbers."""
        if func.namespace != "aten" or not tensors or any(tensor not in self._known for tensor in tensors):
            return False
        with _disable_current_modes():  # other tensors may have the same values
            self._known[tensors[0]] = self._known[tensors[0]].clone()
        return not self._known[tensors[0]].is_floating_point()

    def _all_rows(self, index: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Return the indices that a mask selects if all of it is True; other indices are returned unchanged."""
        if index is None or index.dtype is not torch.bool:
            return [index]
        with _disable_current_modes():
            rows = torch.ones(index.shape, dtype=torch.bool).nonzero(as_tuple=True)
        return [self._make_fake(row, index.device) for row in rows]

    def _make_fake(self, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a fake tensor on ``device`` with known ``values``."""
        made = torch.empty(values.shape, dtype=values.dtype, device=device)
        self._known[made] = values
        return made

    def _remember_all_gather(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """Remember the result of an all-gather: all ranks have this rank's values."""
        if (value := self._known.get(part)) is not None:
            ranks = out.numel() // part.numel()
            with _disable_current_modes():
                self._known[out] = value.repeat(ranks, *[1] * (value.dim() - 1)).reshape(out.shape)

    def _remember(self, out: Any, values: Any) -> None:
        for made, value in zip(_pytree.tree_leaves(out), _pytree.tree_leaves(values), strict=True):
            if not isinstance(made, torch.Tensor):
                continue
            if not value.is_floating_point() or value.numel() <= _MAX_FLOAT_VALUES:
                self._known[made] = value


@cache
def _op_traits(func: Any) -> tuple[bool, bool]:
    """Return two flags: the result of ``func`` has no useful values, and ``func`` mutates its inputs."""
    return func.namespace == "c10d" or "empty" in func._schema.name, func._schema.is_mutable


def _makes_numbers(func: Any, args: Sequence[Any]) -> bool:
    """Return True if ``func`` creates a tensor from host numbers: a range, or a small constant tensor."""
    kind = func._overloadpacket
    return kind in (torch.ops.aten.arange, torch.ops.aten.scalar_tensor) or (
        kind is torch.ops.aten.full and math.prod(args[0]) <= _MAX_FLOAT_VALUES
    )


def _default_value(dtype: torch.dtype) -> bool | float | int:
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
