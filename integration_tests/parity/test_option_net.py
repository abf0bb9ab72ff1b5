"""Models, layouts and options at random are what one process of transformers, autograd and torch's optimizers is.

A fixed few by default; ``MCA_NET_CASES=400`` the first so many, ``MCA_NET_SEED=n`` others, ``MCA_NET_ONLY=17,31``
those.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tiny_versions import require

from cases import needed
from net.case import numbers
from net.drawing import draw
from net.faults import FAULTS
from net.known import KNOWN
from net.run import Verdict, verdicts

pytestmark = pytest.mark.ranks

SEED = int(os.environ.get("MCA_NET_SEED", "0"))
SAMPLE = "4,8,18,24,28"
DEFAULT = not {"MCA_NET_CASES", "MCA_NET_ONLY"} & os.environ.keys()
CHOSEN = numbers(
    SAMPLE if DEFAULT else os.environ.get("MCA_NET_ONLY", ""), int(os.environ.get("MCA_NET_CASES", "0"))
)
BLOCK = 60


class Net:
    """Verdicts, made for a block of neighbours when the first of them is asked for."""

    def __init__(self, chosen: Sequence[int]) -> None:
        blocks = [chosen[start : start + BLOCK] for start in range(0, len(chosen), BLOCK)]
        self.numbers = tuple(chosen)
        self._block = {number: tuple(block) for block in blocks for number in block}
        self._verdicts = cache(self._of_block)

    def __getitem__(self, number: int) -> Verdict:
        return self._verdicts(self._block[number])[number]

    def _of_block(self, block: tuple[int, ...]) -> dict[int, Verdict]:
        return {verdict.case.number: verdict for verdict in verdicts(draw(SEED, number) for number in block)}


@pytest.fixture(scope="module")
def net(request: pytest.FixtureRequest) -> Net:
    return Net(sorted(needed(request, "number")))


@pytest.mark.cases(int(not DEFAULT), always=["4", "28"] if DEFAULT else [])
@pytest.mark.parametrize("number", CHOSEN)
def test_training_equals_one_process_of_transformers(number: int, net: Net) -> None:
    require(net[number].case.base, net[number].case.changes)
    assert not net[number].wrong, str(net[number])


@pytest.mark.skipif(not DEFAULT, reason="of the fixed sample")
def test_most_of_the_sample_is_trained(net: Net) -> None:
    refused = [str(net[number]) for number in net.numbers if not net[number].figures]
    assert len(refused) <= 1, refused


@pytest.fixture(scope="module")
def small(request: pytest.FixtureRequest) -> dict[str, Verdict]:
    """Return the verdicts of cases that faults break, without and with the faults, and of known cases."""
    names = needed(request, "name")
    faults = {name: case for name, (_, case, _) in FAULTS.items() if name in names}
    cases = [replace(case, fault=fault) for name, case in faults.items() for fault in ("", name)]
    cases += [case for name, case in KNOWN.items() if name in names]
    return {verdict.case.name: verdict for verdict in verdicts(cases)}


@pytest.mark.qualify
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str, small: dict[str, Verdict]) -> None:
    _, case, where = FAULTS[name]
    without, wrong = small[case.name], small[replace(case, fault=name).name].wrong
    assert without.figures, str(without)
    assert not without.wrong, str(without)
    assert any(line.startswith(where) for line in wrong), wrong


# faults found before, all but one, whose rates test_train_muon.py has too
@pytest.mark.cases(0, always=[name for name in KNOWN if name != "prediction-rates"])
@pytest.mark.parametrize("name", KNOWN)
def test_what_was_found_before_is_right(name: str, small: dict[str, Verdict]) -> None:
    require(KNOWN[name].base, KNOWN[name].changes)
    verdict = small[KNOWN[name].name]
    assert verdict.figures, str(verdict)
    assert not verdict.wrong, str(verdict)


@pytest.mark.qualify
def test_it_runs_by_itself() -> None:
    command = [sys.executable, "-m", "net", "0", "0"]
    folder = Path(__file__).parents[1] / "support"
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "0 right" in ran.stdout
