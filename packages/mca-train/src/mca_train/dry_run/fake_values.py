"""What only tensors with memory know, answered for tensors without: values that the host reads.

The lengths of packed sequences are known, and which tokens go to which experts: to all of them alike. So is whatever is
computed of these alone, but for tables of many fractions, such as angles of positions. All other values are 1, or true:
they are norms, scales and flags that decide nothing about sizes.
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

_GROUPED = (
    torch.ops.c10d.reduce_scatter_tensor_coalesced_.default,
    torch.ops.c10d.allgather_into_tensor_coalesced_.default,
    torch.ops.c10d.allreduce_coalesced_.default,
)
"""Collectives for which torch has no answer of its own."""
_FRACTIONS = 4096
"""In a tensor whose values are kept, at most."""
_HOST = torch.device("cpu")
"""Where known values are, whatever device their tensors are on."""


class Answers(TorchDispatchMode):
    """Stands above ``fake`` and answers what that cannot."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake
        self._known: Any = WeakTensorKeyDictionary()

    def fake_of(self, tensor: torch.Tensor, *, known: bool) -> torch.Tensor:
        """``tensor`` without its memory; with ``known`` its values can be asked for."""
        made: torch.Tensor = self._fake.from_tensor(tensor)
        if known:
            self._known[made] = tensor
        return made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs ``func``, or answers it."""
        options = dict(kwargs or {})
        if func in _GROUPED:
            from torch._C._distributed_c10d import FakeWork

            return FakeWork().boxed()
        if func is torch.ops.aten.masked_select.default and args[1] in self._known:
            with _disable_current_modes():
                count = int(self._known[args[1]].expand(args[0].shape).sum())
            return args[0].new_empty(count)
        if func is torch.ops.aten.lift_fresh.default and type(args[0]) is torch.Tensor:
            return self.fake_of(args[0], known=True)  # made of numbers that the host has
        values = self._values(func, args, options)
        if func is torch.ops.aten._local_scalar_dense.default:
            return _usual(args[0].dtype) if values is None else values
        try:
            out = func(*args, **options)
        except DynamicOutputShapeException:
            if values is None:
                raise
            device = args[0].device
            return _pytree.tree_map_only(torch.Tensor, lambda value: self._made(value, device), values)
        if func is torch.ops.c10d._allgather_base_.default:
            self._gathered(args[0], args[1])
        elif values is not None:
            self._remember(out, values)
        return out

    def know(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """From here on ``tensor`` has the values of ``value``."""
        self._known[tensor] = value

    def listed(self, tensor: torch.Tensor) -> Any:
        """The values of ``tensor``, which must be known, as lists."""
        with _disable_current_modes():
            return self._known[tensor].tolist()

    def _values(self, func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """What ``func`` gives for true values; None if it takes a tensor whose values are not known."""
        valueless, mutable = _kind(func)
        if valueless:
            return None
        first = args[0] if args else None
        if not mutable and isinstance(first, torch.Tensor) and first not in self._known:
            return None
        tensors = [leaf for leaf in _pytree.tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]
        if mutable:
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

    def _made(self, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A tensor without memory on ``device`` that has ``values``."""
        made = torch.empty(values.shape, dtype=values.dtype, device=device)
        self._known[made] = values
        return made

    def _gathered(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """Other ranks have what this one has."""
        if (value := self._known.get(part)) is not None:
            ranks = out.numel() // part.numel()
            with _disable_current_modes():
                self._known[out] = value.repeat(ranks, *[1] * (value.dim() - 1)).reshape(out.shape)

    def _remember(self, out: Any, values: Any) -> None:
        for made, value in zip(_pytree.tree_leaves(out), _pytree.tree_leaves(values), strict=True):
            if not isinstance(made, torch.Tensor):
                continue
            if not value.is_floating_point() or value.numel() <= _FRACTIONS:
                self._known[made] = value


@cache
def _kind(func: Any) -> tuple[bool, bool]:
    """Whether the values of what ``func`` gives are of no use, and whether it changes what it takes."""
    return func.namespace == "c10d" or "empty" in func._schema.name, func._schema.is_mutable


def _makes_numbers(func: Any, args: Sequence[Any]) -> bool:
    """Whether ``func`` makes a tensor of numbers that the host has: a range, or few of the same."""
    kind = func._overloadpacket
    return kind is torch.ops.aten.arange or (kind is torch.ops.aten.full and math.prod(args[0]) <= _FRACTIONS)


def _usual(dtype: torch.dtype) -> bool | float | int:
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
