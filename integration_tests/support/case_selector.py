"""Select the test cases that run without ``pytest --cases all``: one in n by a hash of its name, and named ones."""

import zlib
from collections.abc import Collection, Iterable


def is_default(module: str, case_id: str, one_in: int, always: Collection[str] = ()) -> bool:
    """Return whether a case runs by default. Only its own name decides, so other cases come and go without effect.

    Args:
        module: The test module's name: its tests share what they compute for a case, other modules take other cases.
        case_id: As pytest shows it.
        one_in: How many cases there are for each that runs; 0: only those in ``always``.
        always: Ids of cases that always run.
    """
    return case_id in always or (one_in > 0 and zlib.crc32(f"{module}[{case_id}]".encode()) % one_in == 0)


def unknown_ids(ids: Collection[str], always: Iterable[str]) -> list[str]:
    """Return what ``always`` names and is not among the ids of a test's cases."""
    return sorted(set(always) - set(ids))
