"""Environment variables of local ranks (rank numbers, threads), and the rendezvous at the launcher's port."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mca_models.megatron.distributed.rendezvous import Attempt

LISTENER = "MCA_TRAIN_LISTENER"
"""The variable with the first rank's descriptor of the listening socket."""


@contextmanager
def listening() -> Iterator[socket.socket]:
    """Yield a socket that listens at a free port of this machine, for the block in which rank 0 inherits it."""
    with socket.create_server(("127.0.0.1", 0), backlog=socket.SOMAXCONN) as listener:
        yield listener


def join(backend: str, timeout: timedelta) -> "Attempt | None":
    """Start the default process group, with the ranks of this launcher or of another one (torchrun).

    Returns:
        The attempt, if the launcher can restart the ranks.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    listener = os.environ.get(LISTENER)
    if listener is None:
        from mca_models.megatron.distributed import (
            rendezvous,
        )  # with torch, before which the threads are limited

        return rendezvous.join(backend, timeout)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        size,
        is_master=rank == 0,
        timeout=timeout,
        master_listen_fd=int(listener) if rank == 0 else None,
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return None


def started_by_launcher() -> bool:
    """Return whether torchrun (or SLURM, or this module) started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first() -> bool:
    """Return whether this process is the launcher or rank 0, which log for all ranks."""
    return not started_by_launcher() or os.environ["RANK"] == "0"


def one_thread_until_forked() -> None:
    """Limit torch to one thread in the launcher, because a thread pool does not survive a fork.

    Call it before torch is imported. The user's OMP_NUM_THREADS applies in the ranks.
    """
    os.environ.setdefault("MCA_THREADS", os.environ.get("OMP_NUM_THREADS", ""))
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # ranks that spin take the cores from those that work


def threads_per_rank(ranks: int, *, gpu: bool = False) -> int:
    """Return the threads of a rank: the user's number, else its share of the cores.

    With a GPU they run the work of the host: the optimizer of offloaded parameters, tokenization, checksums of files.
    Without one, two or three threads do not help small models and are up to 30 times slower on a busy machine, so that
    a small share is one thread.
    """
    requested = os.environ.get("MCA_THREADS", "")
    share = len(os.sched_getaffinity(0)) // ranks
    return int(requested) if requested.isdigit() else share if share >= (1 if gpu else 4) else 1


def rank_environment(rank: int, num_ranks: int, listener: socket.socket) -> dict[str, str]:
    """Return the environment variables for the rendezvous of a rank at the port of ``listener``."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        LISTENER: str(listener.fileno()),
        "TOKENIZERS_PARALLELISM": "false",
    }
