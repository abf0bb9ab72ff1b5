"""Counts what a step allocates, computes and sends, operation by operation, on real tensors or on fake ones.

A storage is counted from the operation that makes it until nothing refers to it. What allocators add (rounding,
fragments) and what kernels and libraries take inside is not counted, even if a view of it is seen.
"""

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mca_train.dry_run.modules import ModuleNames

WEIGHTS, GRADIENTS, OPTIMIZER, REFERENCE, STEP = "weights", "gradients", "optimizer", "reference", "step"
"""Phases in which something is allocated."""
KEPT = "kept"
"""Of a step: what one pass leaves for another."""


@dataclass
class Allocation:
    """One storage."""

    bytes: int
    phase: str
    made_in: int
    """The pass (forward or backward of a micro-batch) in which it was made."""
    ended_in: int | None = None
    """That in which it was freed; None: it is still there."""


@dataclass(frozen=True)
class Peak:
    """The moment with the most bytes."""

    bytes: int = 0
    operation: str = ""
    module: str = ""
    backward: bool = False
    held: tuple[Allocation, ...] = ()

    def sizes(self) -> Counter[str]:
        """Bytes by phase; of a step what another pass than its own ended is `KEPT`."""
        sizes = Counter[str]()
        for found in self.held:
            kept = found.phase == STEP and found.ended_in != found.made_in
            sizes[KEPT if kept else found.phase] += found.bytes
        return sizes


MessageKind = tuple[str, tuple[int, ...]]
"""An operation, and the ranks of its group."""


@dataclass
class Message:
    """Collectives, or messages between pipeline stages, of one kind in one group."""

    operation: str
    ranks: tuple[int, ...]
    count: int = 0
    bytes: int = 0
    """Of this rank's largest buffer in each."""
    each_count: float = 0.0
    each_bytes: float = 0.0
    """What every micro-batch adds; the rest is of a step, whatever their number."""

    def add(self, size: int) -> None:
        """Counts one more."""
        self.count += 1
        self.bytes += size


@dataclass
class Tally:
    """What was counted."""

    live: int = 0
    peak: Peak = field(default_factory=Peak)
    flops: int = 0
    curve: list[int] = field(default_factory=list)
    """Bytes after each operation that changed them."""
    messages: dict[MessageKind, Message] = field(default_factory=dict)
    messages_in: dict[int, dict[MessageKind, Message]] = field(default_factory=dict)
    """The same of each pass, and what follows it."""
    synchronisations: Counter[str] = field(default_factory=Counter)
    """Reads of a value by the host, by module: a GPU would be waited for."""


class Tracker(TorchDispatchMode):
    """Counts in a block; `phase` says what for, `in_pass` tells forward and backward passes apart."""

    def __init__(self, names: ModuleNames) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tally = Tally()
        self.names = names
        self._phase = WEIGHTS
        self._pass = 0
        self._known: dict[int, tuple[Allocation, weakref.ref[Any]]] = {}

    @contextmanager
    def following_storages(self) -> Iterator[None]:
        """A block in which storages that Megatron empties and fills in place are followed: no operation tells of it.

        What has no memory is not filled: torch's fakes would keep both storages as a key of their cache.
        """
        resize, copy = torch.UntypedStorage.resize_, torch.UntypedStorage.copy_

        def told(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            self.resized(storage)

        def filled(storage: torch.UntypedStorage, source: Any, *rest: Any) -> Any:
            return storage if storage.device.type == "meta" else copy(storage, source, *rest)

        with ExitStack() as stack:
            stack.enter_context(patch.object(torch.UntypedStorage, "resize_", told))
            stack.enter_context(patch.object(torch.UntypedStorage, "copy_", filled))
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A block whose allocations are of ``name``."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    @property
    def number(self) -> int:
        """Of the pass that runs."""
        return self._pass

    def next_pass(self) -> None:
        """From here on another pass runs."""
        self._pass += 1

    def restart(self) -> None:
        """Forgets all but what is there now."""
        self.tally = Tally(live=self.tally.live)
        self._note("", False)

    def assign(self, tensor: torch.Tensor, phase: str) -> None:
        """Counts the storage of ``tensor`` as of ``phase``, whenever it was made."""
        self.add(tensor)
        if (known := self._known.get(tensor.untyped_storage()._cdata)) is not None:
            known[0].phase = phase

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs ``func`` and counts what it did."""
        if func is torch.ops.prim.device.default:  # two in three calls, if tensors have no memory
            return args[0].device
        options = dict(kwargs or {})
        if func is torch.ops.aten._local_scalar_dense.default:
            self.tally.synchronisations[self.names.here()[0]] += 1
        out = func(*args, **options)
        if (flops := flop_registry.get(func._overloadpacket)) is not None:
            self.tally.flops += flops(*args, **options, out_val=out)
        if func.namespace == "c10d":
            self._send(func, args)
        self._count(func, out, (args, options))
        return out

    def _count(self, func: Any, out: Any, given: Any) -> None:
        made = [tensor for tensor in _tensors(out) if self._is_new(tensor)]
        if not made:
            return
        if func is not torch.ops.aten.lift_fresh.default:  # which gives what no operation made
            before = {tensor.untyped_storage()._cdata for tensor in _tensors(given)}
            made = [tensor for tensor in made if tensor.untyped_storage()._cdata not in before]
        for tensor in made:
            self.add(tensor)
        if made:
            self._note(str(func._overloadpacket), torch._C._current_autograd_node() is not None)

    def add(self, tensor: torch.Tensor) -> None:
        """Counts the storage of ``tensor``, if it is new."""
        if self._is_new(tensor):
            self._take(tensor.untyped_storage())

    def _is_new(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        return storage._cdata not in self._known and storage.nbytes() > 0

    def _take(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        found = Allocation(storage.nbytes(), self._phase, self._pass)
        self._known[key] = found, weakref.ref(storage, lambda _: self._drop(key))
        self.tally.live += found.bytes

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Counts ``storage`` anew, whose memory was given back or taken again in place."""
        key = storage._cdata
        if key not in self._known:
            return
        self._drop(key)
        self._take(storage)
        self._note("resize", torch._C._current_autograd_node() is not None)

    def _drop(self, key: int) -> None:
        found, _ = self._known.pop(key)
        found.ended_in = self._pass
        self.tally.live -= found.bytes
        self.tally.curve.append(self.tally.live)

    def _note(self, operation: str, backward: bool) -> None:
        tally = self.tally
        tally.curve.append(tally.live)
        if tally.live > tally.peak.bytes:
            held = tuple(found for found, _ in self._known.values())
            tally.peak = Peak(tally.live, operation, self.names.here()[0], backward, held)

    def _send(self, func: Any, args: Sequence[Any]) -> None:
        sizes = [tensor.numel() * tensor.element_size() for tensor in _tensors(args)]
        group = next((found for arg in args if (found := _group(arg)) is not None), None)
        ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else ()
        name = str(func._overloadpacket).removeprefix("c10d.").rstrip("_")
        for told in (self.tally.messages, self.tally.messages_in.setdefault(self._pass, {})):
            told.setdefault((name, ranks), Message(name, ranks)).add(max(sizes, default=0))


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [leaf for leaf in _pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _group(value: object) -> dist.ProcessGroup | None:
    if isinstance(value, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(value)
        except (RuntimeError, TypeError):
            return None
    return value if isinstance(value, dist.ProcessGroup) else None
