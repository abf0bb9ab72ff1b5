"""Rendezvous of the ranks of one machine, at a port on which the launcher listens from the start.

Another program could open a port that is only looked up before the first rank opens it. Ranks of another launcher
(torchrun) use its rendezvous.
"""

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
