"""Every call of a rank that touches a file fails once, while it saves, resumes and exports.

Complete or absent, one line says so, nothing is left, and what goes on has the same losses. A sample by default; all
of them with MCA_EVERY_FAULT=1, about 2,900 a turn.
"""

import errno
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from layouts import tiered
from test_file_faults import ERRORS, EVERY, HERE, compiled
from train_cases import tiny_checkpoint

pytestmark = pytest.mark.ranks

SAMPLE = 1  # of each kind and turn
KINDS = ("save", "resume", "export")
TURNS = range(len(ERRORS))  # in each of which every call fails, one with this error and the next with another

Found = dict[str, Any]


class Runs:
    """`train_fault_runs`, and what every run of it is given."""

    def __init__(self, library: Path, folder: Path) -> None:
        self._folder, self._made = folder, 0
        tiny_checkpoint(folder / "model", num_hidden_layers=2, hidden_size=32, intermediate_size=48)
        environment = os.environ | {"LD_PRELOAD": str(library), "MCA_FAULT_ROOTS": str(folder)}
        command = [sys.executable, str(HERE / "train_fault_runs.py")]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with (folder / "said").open("w") as said:
            self._process = subprocess.Popen(command, env=environment, stderr=said, **pipes)

    def case(
        self, what: str, *, rank: int = 0, number: int = 0, error: int = 0, **more: Any
    ) -> dict[str, Any]:
        self._made += 1
        folder = {"folder": str(self._folder / str(self._made)), "model": str(self._folder / "model")}
        start = {"from": str(self._folder / "saved") if what == "resume" else None}
        return folder | start | {"what": what, "rank": rank, "number": number, "error": error} | more

    def run(self, cases: list[dict[str, Any]]) -> list[Found]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(cases) + "\n")
        self._process.stdin.flush()
        lines = [self._process.stdout.readline() for _ in cases]
        assert all(lines), (self._folder / "said").read_text()
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self._process.communicate()
        assert self._process.returncode == 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("runs")
    made = Runs(compiled(folder / "faults.so"), folder)
    yield made
    made.close()


@pytest.fixture(scope="module")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """What comes of each kind without a fault; the saved one is resumed."""
    cases = {kind: runs.case(kind) for kind in KINDS}
    cases["save"] |= {"folder": cases["resume"]["from"], "keep": True}
    found = dict(
        zip(KINDS, runs.run([cases["save"]]) + runs.run([cases["resume"], cases["export"]]), strict=True)
    )
    for each in found.values():
        assert [rank["error"] for rank in each["ranks"].values()] == [None, None], each
        assert each["ranks"]["0"]["calls"] > 50
    return found


def fault_of(kind: str, found: Found, whole: Found, failed: str) -> str | None:
    """What is wrong with the outcome of a run in which a call of rank ``failed`` has failed; None if nothing is."""
    ranks, tree = found["ranks"], found["tree"]
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


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("turn", tiered(tuple(TURNS), *tuple(TURNS)[1:]))
@pytest.mark.parametrize("kind", KINDS)
def test_every_call_of_a_rank_fails_once(kind: str, turn: int, runs: Runs, whole: dict[str, Found]) -> None:
    calls = {rank: whole[kind]["ranks"][rank]["calls"] for rank in ("0", "1")}
    chosen = [
        (rank, n, ERRORS[(n + turn) % len(ERRORS)]) for rank in calls for n in range(1, calls[rank] + 1)
    ]
    if not EVERY:
        chosen = random.Random(f"{kind} {turn}").sample(chosen, SAMPLE)
    results = runs.run([runs.case(kind, rank=int(rank), number=n, error=error) for rank, n, error in chosen])
    faults = [
        f"{found['ranks'].get(rank)} {n} {errno.errorcode[error]}: {fault}"
        for found, (rank, n, error) in zip(results, chosen, strict=True)
        if (fault := fault_of(kind, found, whole[kind], rank))
    ]
    assert not faults, f"{len(faults)} of {len(results)}:\n" + "\n".join(faults)


KNOWN: dict[str, tuple[str, str, int]] = {
    "the checkpoint's folder cannot be made": ("mkdir", "/checkpoint-1.partial-", 1),
    "Megatron looks into its own": ("readdir64", "/optimizer", 1),
    "Megatron makes its own again": ("mkdir", "/optimizer", 2),
    "the log cannot take its place": ("rename", "/.train_log.jsonl", 1),
}
"""What rank 0 did alone, so that an error left the others waiting, or a file behind: function, path, which of them."""


def test_calls_that_were_not_looked_after(runs: Runs, whole: dict[str, Found]) -> None:
    known = KNOWN.values()
    cases = [runs.case("save", number=n, error=errno.EIO, only=(call, part)) for call, part, n in known]
    for name, found in zip(KNOWN, runs.run(cases), strict=True):
        assert found["ranks"]["0"]["calls"], f"{name}: nothing of that name is called"
        assert fault_of("save", found, whole["save"], "0") is None, (name, found)
