"""The Megatron DDP wrapper of each chunk; a chunk has one at a time.

A wrapper moves gradients, and with a distributed optimizer weights, into its own buffers, and hooks onto the chunk. The
older wrapper is disabled before a new one is made, because both would take the same gradients.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from weakref import WeakKeyDictionary, ref

from torch.nn import Module, Parameter

from mca_models.megatron.types import GptModel, Upstream
from mca_train.types import Chunk, Wrapper

_log = logging.getLogger(__name__)
_WRAPPERS: WeakKeyDictionary[Module, "ref[Wrapper]"] = WeakKeyDictionary()
"""Weak references: a wrapper lives as long as one of its hooks.

This is not an attribute of the chunk, because attributes are copied and pickled with a module.
"""
_CALLED = ("no_sync_func", "grad_sync_func", "param_sync_func")


def ddp_wrapper(chunk: Chunk) -> Wrapper | None:
    """Return Megatron's ``DistributedDataParallel`` that ``chunk`` trains in; None if it never trained."""
    reference = _WRAPPERS.get(chunk)
    return None if reference is None else reference()


def register_wrapper(chunk: Chunk, wrapper: Wrapper) -> None:
    """Record ``wrapper`` as the current one of ``chunk``."""
    _WRAPPERS[chunk] = ref(wrapper)


def unwrap(chunks: Iterable[Chunk]) -> None:
    """Disable the wrappers of ``chunks``, if they have any; collective."""
    wrapped = [(chunk, wrapper) for chunk in chunks if (wrapper := ddp_wrapper(chunk)) is not None]
    if wrapped:
        _log.info("another trainer has trained this model; its optimizer state is discarded")
    for chunk, wrapper in wrapped:
        if wrapper.remove_forward_pre_hook_handles:
            wrapper.disable_forward_pre_hook()
        wrapper.param_to_bucket_group.clear()  # its hooks skip parameters without a group
        wrapper.grad_accs.clear()
        for name in _CALLED:
            setattr(chunk.config, name, None)


@contextmanager
def gathered_params(chunks: Iterable[Chunk]) -> Iterator[None]:
    """Gather all parameters of ``chunks`` within the block; blocks may be nested. Collective.

    With ``overlap_param_gather`` the next forward pass gathers updated parameters otherwise.
    """
    with ExitStack() as hooks:
        for chunk in chunks:
            wrapper = ddp_wrapper(chunk)
            if wrapper is not None and wrapper.remove_forward_pre_hook_handles:
                wrapper.disable_forward_pre_hook()
                hooks.callback(wrapper.enable_forward_pre_hook)
        yield


def defer_vision_grad_sync(wrapped: Upstream, chunk: GptModel) -> None:
    """Make the buckets that hold vision parameters wait for the end of each step.

    With ``overlap_grad_reduce`` Megatron reduces a bucket as soon as all its gradients are ready. The vision model's
    gradients are ready at different points of the backward pass in micro-batches with and without images. Replicas
    would then reduce buckets in different orders.

    Args:
        wrapped: Megatron's ``DistributedDataParallel`` of ``chunk``, with ``overlap_grad_reduce``.
        chunk: Megatron model.
    """
    if not hasattr(chunk, "vision_model"):
        return
    vision: set[Parameter] = set(chunk.vision_model.parameters())
    for group in wrapped.bucket_groups:
        if not vision.isdisjoint(group.params):
            group.reset = _reset_as_first_batch(group, group.reset)


def _reset_as_first_batch(group: Upstream, reset: Callable[[], None]) -> Callable[[], None]:
    """Return a reset that keeps the first batch's behavior: Megatron then waits for the end of the step."""

    def reset_group() -> None:
        reset()
        group.is_first_batch = True
        group.golden_per_param_grad_ready_counts = {}

    return reset_group
