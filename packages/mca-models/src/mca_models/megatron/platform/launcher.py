"""Environment variables by which a launcher assigns ranks, checked before anything waits for other ranks."""

from collections.abc import Iterator, Mapping

from mca_config.errors import McaError, raise_problems
from mca_config.printable import counted

_RANK = ("RANK", "WORLD_SIZE")
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
_NUMBERS = (*_RANK, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


def require_launcher(environment: Mapping[str, str]) -> None:
    """Check the variables of a process that was started as one of several ranks.

    Raises:
        McaError: Variables are missing or no numbers; lists all.
    """
    raise_problems(list(_problems(environment)), "the launcher's variables")


def _problems(environment: Mapping[str, str]) -> Iterator[str]:
    unfit = [name for name in _NUMBERS if name in environment and not environment[name].isdecimal()]
    yield from (f"{name} is {environment[name]!r}; expected a number" for name in unfit)
    if missing := [name for name in (*_RANK, *_RENDEZVOUS) if not environment.get(name)]:
        yield (
            f"{' and '.join(missing)} must be set, so that ranks find each other; set them, or start the ranks with "
            "torchrun"
        )
    if unfit or missing:
        return
    rank, size = (int(environment[name]) for name in _RANK)
    if rank >= size:
        yield f"RANK {rank} is not below WORLD_SIZE {size}; ranks are counted from 0"


def local_rank(environment: Mapping[str, str], gpus: int) -> int:
    """Return the number of this process's GPU.

    Args:
        environment: The variables of this process.
        gpus: Number of GPUs that it sees.

    Raises:
        McaError: There is no such GPU, or several ranks would use the same one.
    """
    local = environment.get("LOCAL_RANK")
    is_alone = any(name not in environment for name in _RANK) or environment["WORLD_SIZE"] == "1"
    if is_alone and local == "-1":  # set by scripts of transformers and DeepSpeed for "not distributed"
        return 0
    if local is None:
        if gpus > 1 and not is_alone:
            raise McaError(
                f"LOCAL_RANK is not set, so that all ranks of this machine would take the first of its {gpus} GPUs; "
                "set it to the rank's number on the machine (SLURM_LOCALID), or start the ranks with torchrun"
            )
        return 0
    if not local.isdecimal():
        raise McaError(f"LOCAL_RANK is {local!r}; expected a number")
    if int(local) >= gpus:
        raise McaError(
            f"LOCAL_RANK is {local}, but this process sees {counted(gpus, 'GPU')}; start at most one rank "
            "for each GPU, and set it to 0 where each rank sees only its own"
        )
    return int(local)
