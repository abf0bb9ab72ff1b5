"""Which of Megatron's wrappers for data parallelism a chunk has: one at a time, whichever trainer made it.

A wrapper puts gradients, and with a distributed optimizer weights, into its own buffers, and hooks onto the chunk. What
an older one does is undone before the next is made: both would take the same gradients.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from weakref import WeakKeyDictionary, ref

from torch.nn import Module

from mca_train.types import Chunk, Wrapper

_log = logging.getLogger(__name__)
_WRAPPERS: WeakKeyDictionary[Module, "ref[Wrapper]"] = WeakKeyDictionary()
"""A wrapper lives as long as one of its hooks, so none that still does something is forgotten.

It is noted here and not on the chunk: what hangs on a module goes along when that is copied or pickled.
"""
_CALLED = ("no_sync_func", "grad_sync_func", "param_sync_func")


def wrapper_of(chunk: Chunk) -> Wrapper | None:
    """Megatron's ``DistributedDataParallel`` that ``chunk`` trains in; None: it never trained."""
    found = _WRAPPERS.get(chunk)
    return None if found is None else found()


def remember(chunk: Chunk, wrapper: Wrapper) -> None:
    """Notes that ``wrapper`` is that of ``chunk`` from now on."""
    _WRAPPERS[chunk] = ref(wrapper)


def unwrap(chunks: Iterable[Chunk]) -> None:
    """Ends what the wrappers of ``chunks`` do, if they have any; collective."""
    found = [(chunk, wrapper) for chunk in chunks if (wrapper := wrapper_of(chunk)) is not None]
    if found:
        _log.info("another trainer has trained this model; the state of its optimizer is not taken over")
    for chunk, wrapper in found:
        if wrapper.remove_forward_pre_hook_handles:
            wrapper.disable_forward_pre_hook()
        wrapper.param_to_bucket_group.clear()  # its hooks do nothing for parameters without one
        wrapper.grad_accs.clear()
        for name in _CALLED:
            setattr(chunk.config, name, None)


@contextmanager
def all_gathered(chunks: Iterable[Chunk]) -> Iterator[None]:
    """A block in which all parameters of ``chunks`` are whole; blocks may be nested. Collective.

    With ``overlap_param_gather`` updated parameters otherwise arrive in the next forward pass.
    """
    with ExitStack() as hooks:
        for chunk in chunks:
            wrapper = wrapper_of(chunk)
            if wrapper is not None and wrapper.remove_forward_pre_hook_handles:
                wrapper.disable_forward_pre_hook()
                hooks.callback(wrapper.enable_forward_pre_hook)
        yield
