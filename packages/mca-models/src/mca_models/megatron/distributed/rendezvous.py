"""Rendezvous of the ranks that torchrun started, also after a restart.

torchrun's agent keeps one store for all restarts of a run. torch gives the ranks of a new attempt the keys of the
previous one, and with them the addresses of ranks that are gone (2.15 does under every rendezvous backend).
torchrun's restart count does not distinguish attempts, because each node counts its own. Therefore the ranks count
attempts in that store.
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
        store: The store that all attempts of the run share.
    """

    number: int
    store: "Store"


def has_kept_store() -> bool:
    """Return whether the launcher keeps a store over restarts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def join(backend: str, timeout: timedelta) -> Attempt | None:
    """Start the default process group; return None if the launcher does not restart ranks.

    Args:
        backend: Backend of torch.distributed.
        timeout: Time that ranks wait for each other.

    Raises:
        McaError: The launcher's variables are missing.
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
    ranks = PrefixStore(f"{_KEYS}/{number}/ranks", store)
    dist.init_process_group(backend, store=ranks, rank=rank, world_size=size, timeout=timeout)
    return Attempt(number, store)


def next_attempt(store: "Store", rank: int, size: int) -> int:
    """Return the number of the attempt that all ``size`` ranks join; every rank calls this once per attempt.

    Rank 0 opens an attempt, the other ranks enter it, and it is formed once all are in. A rank that arrives before its
    rank 0 may see the previous attempt: it skips one that was formed, and leaves one that never formed when the next
    is opened.
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
