"""Calls of a process to the C library on files, and the one of them that fails; `faults.c` asks for it.

    with watched(reported, Fault("mkdir 0/out 1f0c...", nth=1, error=errno.EIO)):
        ...
    heard(reported)

A *site* is a function of the C library, a kind of file (its path without the numbers and random names in it) and all
Python code that leads there, line by line: two calls from one site can differ in nothing but the numbers in a file's
name and how often the loops around them have turned. Its name is the same in every checkout and with every Python, as
long as none of these functions changes; so a sample of faults, which is drawn by name (`lot`), can be had again.
"""

import contextlib
import ctypes
import hashlib
import itertools
import json
import os
import re
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

_VARIABLE = re.compile(r"(?<=/\.tmp)\w{6}|[0-9a-f]{8}|\d+")
_SHOWN = 4  # frames
_PACKAGES = "/site-packages/"
_ROOTS = (f"{Path(__file__).parents[2]}/", f"{sysconfig.get_path('stdlib')}/")


class Site(NamedTuple):
    """Call site; its name has function, kind of file and code."""

    name: str
    times: int
    where: str

    @classmethod
    def all_of(cls, reported: dict[str, Any]) -> list["Site"]:
        """Return the sites of a run, by name."""
        return [cls(name, len(where), where[0]) for name, where in sorted(reported.items())]

    @property
    def number(self) -> int:
        """One that is its own, whichever other sites there are."""
        return int(self.name.rpartition(" ")[2], 16)

    def turn(self, number: int) -> int:
        """Return the index of the first (0), the middle (1) or the last (2) call."""
        return (1, (self.times + 1) // 2, self.times)[number]


@dataclass(frozen=True)
class Fault:
    """The ``nth`` call from ``site`` fails with ``error``."""

    site: str
    nth: int
    error: int


@contextlib.contextmanager
def watched(reported: Path, fault: Fault | None) -> Iterator[None]:
    """Writes to ``reported`` each call of the block, or the one that fails; in the processes that it forks too."""
    roots = os.environ["MCA_FAULT_ROOTS"].split(":")
    calls = itertools.count(1)  # from the fault's site
    known: set[str] = set()
    log = os.open(reported, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    block = sys._getframe(2).f_code

    def answer(function: bytes, path: bytes) -> int:
        start = f"{function.decode()} {_kind(os.fsdecode(path), roots)} "
        if fault is not None and not fault.site.startswith(start):
            return 0
        frame = sys._getframe().f_back
        site = start + code_of(frame, block)
        if fault is not None and (site != fault.site or next(calls) != fault.nth):
            return 0
        os.write(log, json.dumps([site, "" if site in known else _where(frame)]).encode() + b"\n")
        known.add(site)
        return fault.error if fault else 0

    asked = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)(answer)
    library = _library()
    library.faults_ask(asked)
    try:
        yield
    finally:
        library.faults_ask(None)
        os.close(log)


@cache
def _library() -> ctypes.CDLL:
    """Return the library of `faults.c`, preloaded or made to act as if it were."""
    if (path := os.environ.get("MCA_FAULT_LIBRARY")) is None:
        return ctypes.CDLL(None)
    library = ctypes.CDLL(path)
    library.faults_install()
    return library


def heard(reported: Path) -> dict[str, list[str]]:
    """Return the code of each site, in the order of first calls, once for each call; empty if nothing was watched.

    Only the first call of a process says it.
    """
    found: defaultdict[str, list[str]] = defaultdict(list)
    for line in reported.read_text().splitlines() if reported.exists() else ():
        site, where = json.loads(line)
        found[site].append(where)
    return found


def _kind(path: str, roots: list[str]) -> str:
    number = next(n for n, root in enumerate(roots) if path.startswith(root))
    return f"{number}{_VARIABLE.sub('#', path[len(roots[number]) :])}"


def code_of(frame: Any, block: CodeType | None = None) -> str:
    """Return the path to ``frame`` from the function ``block``: each function, with the line from its beginning."""
    stack = []
    while frame is not None and frame.f_code is not block:
        code = frame.f_code
        line = 0 if code.co_name == "<module>" else (frame.f_lineno or 0) - code.co_firstlineno
        stack.append(f"{named(code.co_filename)} {code.co_qualname} {line}\n")
        frame = frame.f_back
    return hashlib.blake2b("".join(stack).encode(), digest_size=8).hexdigest()


@cache
def named(file: str) -> str:
    """``file`` of Python code from the folder of the repository, of packages or of Python on."""
    if _PACKAGES in file:
        return file.rpartition(_PACKAGES)[2]
    return next((file.removeprefix(root) for root in _ROOTS if file.startswith(root)), file)


def lot(*words: object) -> bytes:
    """Return the position of an item in a sample's order, independent of the other items."""
    return hashlib.blake2b(repr(words).encode(), digest_size=8).digest()


def _where(frame: Any) -> str:
    shown = []
    while frame is not None and len(shown) < _SHOWN:
        shown.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(shown)
