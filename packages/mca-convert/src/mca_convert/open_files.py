"""Limit of open files: the soft limit is raised to the hard one."""

import resource

from mca_config.errors import McaError

_OTHER_FILES = 16


def allow_open_files(count: int) -> None:
    """Raise the soft limit of open files to the hard one, because large checkpoints have hundreds of files.

    Raises:
        McaError: ``count`` files are more than the hard limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if fault := too_many_files(count):
        raise McaError(fault)


def too_many_files(count: int) -> str | None:
    """Return the message if ``count`` files cannot be open at once, else None."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or count + _OTHER_FILES <= hard:
        return None
    return (
        f"{count} files must be open at once, the system allows {hard}; raise its limit (ulimit -Hn), or convert "
        "to fewer files (a larger --max_shard_size, smaller parallel sizes)"
    )
