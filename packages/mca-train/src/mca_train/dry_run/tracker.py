"""Tracker of a step's allocations, FLOPs and messages, per operation and module, on real or fake tensors.

A storage counts from the operation that creates it until its last reference is gone. The overhead of allocators
(rounding, fragmentation) and the workspaces of kernels and libraries are not counted, even if a view of one is visible.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mca_models.megatron.platform import replaced
from mca_train.batching.micro_batch import StepBatch
from mca_train.plan.schedule import Pass
from mca_train.types import Upstream

if TYPE_CHECKING:
    from mca_train.engine.engine import Engine

WEIGHTS, GRADIENTS, OPTIMIZER, REFERENCE, STEP = "weights", "gradients", "optimizer", "reference", "step"
"""Phases of allocations."""
_BETWEEN_STAGES = ("send", "recv", "recv_any_source")
KEPT = "kept"
"""Category of tensors of a step that one pass keeps for another."""
MessageKind = tuple[str, tuple[int, ...]]
"""Operation, and ranks of its process group."""


class ModuleNames:
    """Tracer of the module that is running.

    A backward pass runs no modules. Its operations belong to the module whose forward created the running autograd
    node, found by the node's sequence number, which increases with the operations of a forward pass.
    """

    def __init__(self) -> None:
        self._names: dict[torch.nn.Module, str] = {}
        self._stack: list[str] = []
        self._name_by_node: dict[int, str] = {}

    def add_names(self, chunks: Iterable[torch.nn.Module]) -> None:
        """Add the names of all modules in ``chunks``."""
        for chunk in chunks:
            self._names |= {module: name for name, module in chunk.named_modules()}

    @contextmanager
    def trace(self) -> Iterator[None]:
        """Context in which the running module is traced."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def current(self) -> tuple[str, bool]:
        """Return the name of the running module, and True in its backward pass."""
        node: Upstream = torch._C._current_autograd_node()
        if node is not None and not self._stack:
            return self._name_by_node.get(node._sequence_nr(), ""), True
        name = self._stack[-1] if self._stack else ""
        # the node of this operation exists already
        self._name_by_node[torch._C._autograd._get_sequence_nr() - 1] = name
        return name, False

    def _enter(self, module: torch.nn.Module, _: object) -> None:
        self._stack.append(self._names.get(module) or (self._stack[-1] if self._stack else ""))

    def _leave(self, module: torch.nn.Module, _: object, __: object) -> None:
        self._stack.pop()


@dataclass
class Allocation:
    """A storage."""

    bytes: int
    phase: str
    made_in: int
    """Number of the pass (forward or backward of a micro-batch) that allocated it."""
    ended_in: int | None = None
    """Number of the pass that freed it; None: it is still allocated."""


@dataclass(frozen=True)
class Peak:
    """Moment with the most allocated bytes."""

    bytes: int = 0
    operation: str = ""
    module: str = ""
    backward: bool = False
    allocations: tuple[Allocation, ...] = ()

    def sizes(self) -> Counter[str]:
        """Return the bytes per phase, with those of a step that outlive their pass under `KEPT`."""
        sizes = Counter[str]()
        for found in self.allocations:
            kept = found.phase == STEP and found.ended_in != found.made_in
            sizes[KEPT if kept else found.phase] += found.bytes
        return sizes


@dataclass
class Message:
    """Collectives or point-to-point messages of one operation in one process group."""

    operation: str
    ranks: tuple[int, ...]
    count: int = 0
    bytes: int = 0
    """Sum of this rank's largest buffer in each message."""
    each_count: float = 0.0
    each_bytes: float = 0.0
    """Increase per micro-batch; the rest is sent once per step."""

    def add(self, size: int) -> None:
        """Count one more message of ``size`` bytes."""
        self.count += 1
        self.bytes += size


@dataclass
class Tally:
    """Counters of a step."""

    live: int = 0
    peak: Peak = field(default_factory=Peak)
    flops: int = 0
    curve: list[int] = field(default_factory=list)
    """Allocated bytes after each change."""
    messages: dict[MessageKind, Message] = field(default_factory=dict)
    messages_in: dict[int, dict[MessageKind, Message]] = field(default_factory=dict)
    """Messages of each pass, including those sent between it and the next pass."""
    synchronisations: Counter[str] = field(default_factory=Counter)
    """Values read by the host, per module; on a GPU each read is a synchronisation."""


class Tracker(TorchDispatchMode):
    """Dispatch mode that counts operations, per `phase` and per pass."""

    def __init__(self, names: ModuleNames) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tally = Tally()
        self.names = names
        self._phase = WEIGHTS
        self._pass = 0
        self._known: dict[int, tuple[Allocation, weakref.ref[Any]]] = {}

    @contextmanager
    def track_storages(self) -> Iterator[None]:
        """Context that tracks storages that Megatron resizes and refills in place, without a dispatched operation.

        Copies into meta storages are skipped, because fake tensors would keep both storages alive in their cache.
        """
        resize, copy = torch.UntypedStorage.resize_, torch.UntypedStorage.copy_

        def tracked_resize(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            self.recount(storage)

        def filled(storage: torch.UntypedStorage, source: Any, *rest: Any) -> Any:
            return storage if storage.device.type == "meta" else copy(storage, source, *rest)

        with ExitStack() as stack:
            stack.enter_context(replaced(torch.UntypedStorage, "resize_", tracked_resize))
            stack.enter_context(replaced(torch.UntypedStorage, "copy_", filled))
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context in which allocations belong to phase ``name``."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    @property
    def number(self) -> int:
        """Number of the running pass."""
        return self._pass

    def next_pass(self) -> None:
        """Start the next pass."""
        self._pass += 1

    def restart(self) -> None:
        """Reset all counters except the allocated bytes."""
        self.tally = Tally(live=self.tally.live)
        self._note("", False)

    def assign(self, tensor: torch.Tensor, phase: str) -> None:
        """Move the storage of ``tensor`` to ``phase``."""
        self.add(tensor)
        if (known := self._known.get(tensor.untyped_storage()._cdata)) is not None:
            known[0].phase = phase

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run ``func`` and count its effects."""
        if func is torch.ops.prim.device.default:  # two thirds of all calls with fake tensors
            return args[0].device
        options = dict(kwargs or {})
        if func is torch.ops.aten._local_scalar_dense.default:
            self.tally.synchronisations[self.names.current()[0]] += 1
        out = func(*args, **options)
        if (flops := flop_registry.get(func._overloadpacket)) is not None:
            self.tally.flops += flops(*args, **options, out_val=out)
        if func.namespace == "c10d":
            self._count_message(func, args)
        self._count(func, out, (args, options))
        return out

    def _count(self, func: Any, out: Any, inputs: Any) -> None:
        made = [tensor for tensor in _tensors(out) if self._is_new(tensor)]
        if not made:
            return
        if func is not torch.ops.aten.lift_fresh.default:  # its result was created outside of the dispatcher
            before = {tensor.untyped_storage()._cdata for tensor in _tensors(inputs)}
            made = [tensor for tensor in made if tensor.untyped_storage()._cdata not in before]
        for tensor in made:
            self.add(tensor)
        if made:
            self._note(str(func._overloadpacket), torch._C._current_autograd_node() is not None)

    def add(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor``, unless it is counted already."""
        if self._is_new(tensor):
            self._add_storage(tensor.untyped_storage())

    def _is_new(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        return storage._cdata not in self._known and storage.nbytes() > 0

    def _add_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        found = Allocation(storage.nbytes(), self._phase, self._pass)
        self._known[key] = found, weakref.ref(storage, lambda _: self._remove_storage(key))
        self.tally.live += found.bytes

    def recount(self, storage: torch.UntypedStorage) -> None:
        """Count ``storage`` again after it was freed or reallocated in place."""
        key = storage._cdata
        if key not in self._known:
            return
        self._remove_storage(key)
        self._add_storage(storage)
        self._note("resize", torch._C._current_autograd_node() is not None)

    def _remove_storage(self, key: int) -> None:
        found, _ = self._known.pop(key)
        found.ended_in = self._pass
        self.tally.live -= found.bytes
        self.tally.curve.append(self.tally.live)

    def _note(self, operation: str, backward: bool) -> None:
        tally = self.tally
        tally.curve.append(tally.live)
        if tally.live > tally.peak.bytes:
            allocations = tuple(found for found, _ in self._known.values())
            tally.peak = Peak(tally.live, operation, self.names.current()[0], backward, allocations)

    def _count_message(self, func: Any, args: Sequence[Any]) -> None:
        sizes = [tensor.numel() * tensor.element_size() for tensor in _tensors(args)]
        group = next((found for arg in args if (found := _group(arg)) is not None), None)
        ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else ()
        name = str(func._overloadpacket).removeprefix("c10d.").rstrip("_")
        for messages in (self.tally.messages, self.tally.messages_in.setdefault(self._pass, {})):
            messages.setdefault((name, ranks), Message(name, ranks)).add(max(sizes, default=0))


def split_per_micro_batch(
    tally: Tally, reference: Mapping[MessageKind, Message], passes: Sequence[int], micro_batches: int
) -> tuple[Message, ...]:
    """Return the messages of a step, each with its count and bytes per micro-batch.

    Args:
        tally: Counts of a step.
        reference: Messages of the reference model, which runs all micro-batches before the first is trained.
        passes: Numbers of one forward and one backward pass of each chunk, without the messages that are sent once
            per step.
        micro_batches: Number of micro-batches in the step.
    """
    messages = []
    for kind, message in tally.messages.items():
        shared = reference.get(kind, Message(*kind))
        per_pass = [tally.messages_in.get(number, {}) for number in passes]
        if message.operation in _BETWEEN_STAGES:  # sent after another pass than the one that they belong to
            shared, per_pass = message, []
        sent = [messages_in[kind] for messages_in in per_pass if kind in messages_in]
        count = shared.count / micro_batches + sum(item.count for item in sent)
        size = shared.bytes / micro_batches + sum(item.bytes for item in sent)
        messages.append(replace(message, each_count=count, each_bytes=size))
    return tuple(messages)


def add_micro_batches(message: Message, micro_batches: int) -> Message:
    """Return ``message`` of a step with ``micro_batches`` more micro-batches."""
    return replace(
        message,
        count=message.count + round(micro_batches * message.each_count),
        bytes=message.bytes + round(micro_batches * message.each_bytes),
    )


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


_PARAMETER_HOOKS = ("finalize_model_grads_func", "grad_sync_func", "param_sync_func")
"""Callbacks in Megatron's configuration that need gradients, which skipped passes do not produce."""


class PassTracer:
    """Tracer of the forward and backward passes of a step; a backward pass is matched by its output tensor."""

    def __init__(self, tracker: Tracker) -> None:
        self.ran: list[Pass] = []
        self._numbers: list[int] = []
        self._tracker = tracker
        self._pass_by_output: dict[int, tuple[int, int]] = {}
        self._num_forward: dict[int, int] = {}

    def clear(self) -> None:
        """Forget all passes."""
        self.ran.clear()
        self._numbers.clear()
        self._num_forward.clear()
        self._pass_by_output.clear()

    def micro_batch_passes(self) -> list[int]:
        """Return the numbers of one forward and one backward pass per chunk, from micro-batches in the middle.

        The first forward passes also all-gather weights, and the last backward passes also reduce gradients.
        """
        both = list(zip(self.ran, self._numbers, strict=True))
        forward = {step.chunk: number for step, number in both if step.forward}
        backward = {step.chunk: number for step, number in reversed(both) if not step.forward}
        return [*forward.values(), *backward.values()]

    def _start_pass(self, step: Pass) -> None:
        self._tracker.next_pass()
        self.ran.append(step)
        self._numbers.append(self._tracker.number)

    @contextmanager
    def trace(self, *, skip_compute: bool = False) -> Iterator[None]:
        """Context in which the tracker is notified of each pass; with ``skip_compute`` passes compute nothing."""
        from megatron.core.pipeline_parallel import schedules

        forward, backward = schedules.forward_step, schedules.backward_step
        if skip_compute:
            forward, backward = _no_forward, _no_backward

        def traced_forward(*args: Any, **kwargs: Any) -> Any:
            chunk = kwargs.get("vp_stage") or 0
            number = self._num_forward[chunk] = self._num_forward.get(chunk, -1) + 1
            self._start_pass(Pass(True, chunk, number))
            result = forward(*args, **kwargs)
            self._pass_by_output[_identity(result[0])] = chunk, number
            return result

        def traced_backward(input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self._start_pass(Pass(False, *self._pass_by_output.pop(_identity(output_tensor))))
            return backward(input_tensor, output_tensor, *args, **kwargs)

        with ExitStack() as stack:
            stack.enter_context(replaced(schedules, "forward_step", traced_forward))
            stack.enter_context(replaced(schedules, "backward_step", traced_backward))
            yield


def _identity(output: Any) -> int:
    """Return the id of a chunk's output tensor, which some schedules wrap in a list."""
    return id(output[0] if isinstance(output, list) else output)


def _no_forward(*args: Any, **_: Any) -> tuple[Any, torch.Tensor]:
    """Return empty outputs in the form of ``forward_step``: outputs, as a list if inputs are, and a token count."""
    out, inputs = torch.empty(1), args[4]
    return [out] if isinstance(inputs, list) else out, torch.zeros((), dtype=torch.int)


def _no_backward(inputs: Any, *_: Any) -> Any:
    return [_gradient(one) for one in inputs] if isinstance(inputs, list) else _gradient(inputs)


def _gradient(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else torch.empty_like(tensor)


def schedule_order(
    engine: "Engine", batch: StepBatch, micro_batches: int, tracker: Tracker
) -> tuple[Pass, ...]:
    """Return the passes of this rank in a step of ``micro_batches``; collective.

    Args:
        engine: Engine of the run.
        batch: Batch of a step, of any number of micro-batches.
        micro_batches: Number of micro-batches to schedule.
        tracker: Tracker of the dry run.
    """
    passes = PassTracer(tracker)
    like = replace(batch, micro_batches=batch.micro_batches[:1] * micro_batches)
    with ExitStack() as stack:
        for config in engine.configs:
            for name in _PARAMETER_HOOKS:
                stack.enter_context(replaced(config, name, None))
        stack.enter_context(passes.trace(skip_compute=True))
        engine.run(like, forward_only=False)
    return tuple(passes.ran)
