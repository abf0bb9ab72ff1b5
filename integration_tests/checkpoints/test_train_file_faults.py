"""Every call of a rank that touches a file fails once, while it saves, resumes and exports.

The result is complete or absent, one line reports it, nothing is left, and a resumed run has the same losses.
By default a few calls fail. With `--cases all` each site (see `fault_sites`: calls of one function on one kind of file
from the same code are one) fails with each of the errors: the first, the middle and the last call from it, one a turn.
"""

import dataclasses
import errno
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fault_library import ERRORS, compiled
from fault_sites import Fault, Site, lot
from train_cases import tiny_checkpoint
from train_fault_runs import run_all

pytestmark = pytest.mark.ranks

SAMPLE = 1  # of each kind and turn
KINDS = (  # resume and export run only with `--cases all`, for many minutes: another worker may take each
    "save",
    *(pytest.param(kind, marks=pytest.mark.xdist_group(kind)) for kind in ("resume", "export")),
)
TURNS = range(len(ERRORS))  # in each of which every site fails, one with this error and the next with another

LOCK = ".mca-train.lock"
LOOK_UPS = frozenset(
    "stat64 lstat64 fstat64 fstatat64 statx access open64 opendir readdir64 read close".split()
)
"""Functions with which a rank looks into a folder."""
Found = dict[str, Any]


class Runs:
    """`train_fault_runs` of one model, and the outcome of each kind of run without a fault."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self._folder, self._scratch, self._made = folder, scratch, 0
        self._whole: dict[str, Found] = {}
        tiny_checkpoint(folder / "model", num_hidden_layers=2, hidden_size=32, intermediate_size=48)

    def case(self, what: str, fault: Fault | None = None, *, rank: str = "0", **more: Any) -> dict[str, Any]:
        self._made += 1
        folder = {"folder": str(self._folder / str(self._made)), "model": str(self._folder / "model")}
        start = {"from": str(self._folder / "0") if what == "resume" else None}
        faulty = {"rank": int(rank), "fault": dataclasses.asdict(fault) if fault else None}
        return folder | start | faulty | {"what": what} | more

    def run(self, cases: list[dict[str, Any]]) -> list[Found]:
        return run_all(cases, self._scratch)

    def whole(self, kind: str) -> Found:
        """Return the outcome of a run without a fault; the saved one is resumed."""
        if kind not in self._whole:
            kept = {"folder": str(self._folder / "0"), "keep": True} if kind == "save" else {}
            if kind == "resume":
                self.whole("save")
            (found,) = self.run([self.case(kind) | kept])
            assert [rank["error"] for rank in found["ranks"].values()] == [None, None], found
            assert len(found["sites"]["0"]) > 50
            self._whole[kind] = found
        return self._whole[kind]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder, scratch = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("scratch")
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("MCA_FAULT_LIBRARY", str(compiled(scratch / "faults.so")))
        changed.setenv("MCA_FAULT_ROOTS", str(folder))
        yield Runs(folder, scratch)


def fault_of(kind: str, found: Found, whole: Found, failed: str) -> str | None:
    """Return the problem with a run in which a call of rank ``failed`` has failed; None: there is none."""
    ranks, tree = found["ranks"], dict(found["tree"])
    if any(LOCK in site for site in found["sites"][failed]):
        tree.pop(LOCK, None)  # it cannot be removed, and says so
    if any(".partial-" in name for name in tree):
        return f"left {[name for name in tree if '.partial-' in name][:3]}"
    if all(rank["error"] is None for rank in ranks.values()):
        if tree != whole["tree"]:
            return f"went on, and {sorted(tree.items() ^ whole['tree'].items())[:5]}"
        losses = [
            {number: rank["losses"] for number, rank in each["ranks"].items()} for each in (found, whole)
        ]
        return None if losses[0] == losses[1] else f"other losses: {losses}"
    said = ranks[failed]
    if said["error"] != "McaError" or "\n" in said["said"] or "/" not in said["said"]:
        return f"{said['error']}"
    complete = {name: size for name, size in tree.items() if name.startswith(("checkpoint-1/", "out/"))}
    expected = {name: size for name, size in whole["tree"].items() if name in complete}
    return None if complete in ({}, expected) else f"incomplete: {sorted(complete)[:5]}"


def by_chance(rank: str, fault: Fault) -> bool:
    """Return True if a call may be missing: how often a rank looks into a folder depends on the others.

    Rank 0 makes the run's folder to try it and removes it again; another rank may look before, while or after, and
    looks for earlier results (a log, a state, an export) only in a folder.
    """
    function, path = fault.site.split()[:2]
    return fault.nth > 1 or (
        rank != "0" and function in LOOK_UPS and re.fullmatch(r"0/#(/[^/]+)?", path) is not None
    )


@pytest.mark.cases(0, always=["save-0"])
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_call_of_a_rank_fails_once(kind: str, turn: int, runs: Runs, every_case: bool) -> None:
    whole = runs.whole(kind)
    chosen = [
        (rank, Fault(site.name, site.turn(turn), ERRORS[(site.number + turn) % len(ERRORS)]))
        for rank, reported in whole["sites"].items()
        for site in Site.all_of(reported)
    ]
    if not every_case:
        chosen = sorted(chosen, key=lambda each: lot(kind, turn, each[0], each[1].site))[:SAMPLE]
    results = runs.run([runs.case(kind, fault, rank=rank) for rank, fault in chosen])
    unheard = [
        (rank, fault)
        for found, (rank, fault) in zip(results, chosen, strict=True)
        if not found["sites"][rank] and not by_chance(rank, fault)
    ]
    assert not unheard, unheard
    faults = [
        f"{fault.nth} {errno.errorcode[fault.error]} {found['sites'][rank]}: {wrong}\n{found['ranks'].get(rank)}"
        for found, (rank, fault) in zip(results, chosen, strict=True)
        if (wrong := fault_of(kind, found, whole, rank))
    ]
    assert not faults, f"{len(faults)} of {len(results)}:\n" + "\n".join(faults)


KNOWN: dict[str, tuple[str, str, str, int]] = {
    "the checkpoint's folder cannot be made": ("save", "mkdir", "/checkpoint-#.partial-#", 0),
    "Megatron looks into its own": ("save", "readdir64", "/optimizer", 0),
    "Megatron makes its own again": ("save", "mkdir", "/optimizer", 1),
    "the log cannot take its place": ("save", "rename", "/.train_log.jsonl", 0),
    "the directory cannot be listed when all is written": ("save", "opendir", "output_files.py", -1),
    "torch's reader of a random state": ("resume", "close", "/training/rng_", 0),
}
"""Faults that once left the other rank waiting, a file behind, or a traceback.

Kind of run, function, a part of the path or of the code, and which of these calls.
"""


def known(reported: dict[str, list[str]], function: str, part: str, which: int) -> Fault:
    """One of `KNOWN` that fails with EIO."""
    fitting = [
        (site, nth)
        for site, where in reported.items()
        for nth in range(1, len(where) + 1)
        if site.startswith(f"{function} ") and part in f"{site} {where[0]}"
    ]
    return Fault(*fitting[which], error=errno.EIO)


def test_calls_that_were_not_looked_after(runs: Runs, every_case: bool) -> None:
    chosen = dict(list(KNOWN.items())[:: 1 if every_case else 3])
    cases = [  # sites are in the order of the first call from each
        runs.case(kind, known(runs.whole(kind)["sites"]["0"], *which)) for kind, *which in chosen.values()
    ]
    for (name, (kind, *_)), found in zip(chosen.items(), runs.run(cases), strict=True):
        assert found["sites"]["0"], f"{name}: it is not called"
        assert fault_of(kind, found, runs.whole(kind), "0") is None, (name, found)
