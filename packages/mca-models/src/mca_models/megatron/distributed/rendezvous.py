"""Where ranks meet that torchrun started, and meet again when it starts them anew.

torchrun's agent keeps one store for all attempts of a run. torch gives the ranks of a new attempt the keys of the one
before, and with them the addresses of ranks that are gone (2.15 does under every rendezvous). torchrun's own count of
restarts does not tell attempts apart: each node counts its own. So the ranks count here, in that store.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from mca_models.megatron import platform

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_COUNT, _KEYS = "mca/attempts", "mca/attempt"
_FORMED, _OVER = "formed", "over"


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks of a run.

    Args:
        number: 1 for the first.
        store: What every attempt of the run sees.
    """

    number: int
    store: "Store"


def has_kept_store() -> bool:
    """Whether the launcher keeps a store from attempt to attempt."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def join(backend: str, timeout: timedelta) -> Attempt | None:
    """Starts the default process group of ranks that a launcher started; None: it does not start them anew.

    Args:
        backend: Of torch.distributed.
        timeout: How long ranks wait for each other.

    Raises:
        McaError: The launcher has not said how they find each other.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    platform.require_launcher(os.environ)
    if not has_kept_store():
        dist.init_process_group(backend, timeout=timeout)
        return None
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timeout)
    number = next_attempt(store, rank, size)
    own = PrefixStore(f"{_KEYS}/{number}/ranks", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)
    return Attempt(number, store)


def next_attempt(store: "Store", rank: int, size: int) -> int:
    """The number of the attempt that all ``size`` ranks are in; every rank calls this once in each.

    Rank 0 opens it, the others enter, and it holds when all are in. A rank that comes before its rank 0 may find the
    last attempt: one that held it passes over, one that ended before all were in it leaves when the next is opened.
    """
    if rank == 0:
        number = store.add(_COUNT, 1)
        store.set(_state(number - 1), _OVER)
        store.set(_opened(number), "")
        if size > 1:
            store.wait([_full(number)])
        store.set(_state(number), _FORMED)
        return number
    number = max(store.add(_COUNT, 0), 1)
    while True:
        store.wait([_opened(number)])
        if not store.check([_state(number)]):
            if store.add(f"{_KEYS}/{number}/entered", 1) == size - 1:
                store.set(_full(number), "")
            if store.get(_state(number)) == _FORMED.encode():
                return number
        number += 1


def _opened(number: int) -> str:
    return f"{_KEYS}/{number}/opened"


def _full(number: int) -> str:
    return f"{_KEYS}/{number}/full"


def _state(number: int) -> str:
    return f"{_KEYS}/{number}/state"
