"""What local ranks know of one another, and who started this process. It starts nothing itself."""

import os
import socket
from collections.abc import Mapping

from mca_train.launch.rendezvous import LISTENER


def started_by_launcher(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun (or SLURM, or this module) started this process as one of several ranks."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def is_first() -> bool:
    """Return whether this process speaks for all ranks: it starts them, or is the first of them."""
    return not started_by_launcher() or os.environ["RANK"] == "0"


def one_thread_until_forked() -> None:
    """Keep torch to one thread in the launcher: a pool of threads does not survive a fork.

    To be called before torch is imported. What the user asked for (OMP_NUM_THREADS) holds in the ranks.
    """
    os.environ.setdefault("MCA_THREADS", os.environ.get("OMP_NUM_THREADS", ""))
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # ranks that spin take the cores from those that work


def threads_per_rank(ranks: int) -> int:
    """Threads for a rank on a machine without a GPU: what the user asked for, else its share of the cores.

    A share of two or three gains nothing on small models and costs up to 30 times on a busy machine.
    """
    asked = os.environ.get("MCA_THREADS", "")
    share = len(os.sched_getaffinity(0)) // ranks
    return int(asked) if asked.isdigit() else share if share >= 4 else 1


def threads_per_gpu_rank(ranks: int) -> int:
    """Threads for a rank that has a GPU: what the user asked for, else its share of the cores.

    They are for what the host does: the optimizer of offloaded parameters, tokens, checksums of files.
    """
    asked = os.environ.get("MCA_THREADS", "")
    return int(asked) if asked.isdigit() else max(1, len(os.sched_getaffinity(0)) // ranks)


def rank_environment(rank: int, num_ranks: int, listener: socket.socket) -> dict[str, str]:
    """The variables by which a rank finds the others, at the port of ``listener``."""
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
