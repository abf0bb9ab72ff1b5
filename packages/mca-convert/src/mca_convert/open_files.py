"""How many files may be open at once.

It raises the soft limit as far as the system lets a process.
"""

import resource

from mca_config.errors import McaError

_OTHER_FILES = 16


def allow_open_files(count: int) -> None:
    """Raise the soft limit of open files to the hard one: large checkpoints have hundreds.

    Raises:
        McaError: ``count`` files are more than that.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if fault := too_many_files(count):
        raise McaError(fault)


def too_many_files(count: int) -> str | None:
    """What to say where ``count`` files cannot be open at once; None if they can."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or count + _OTHER_FILES <= hard:
        return None
    return (
        f"{count} files must be open at once, the system allows {hard}; raise its limit (ulimit -Hn), or convert "
        "to fewer files (a larger --max_shard_size, smaller parallel sizes)"
    )
