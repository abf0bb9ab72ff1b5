"""The cases that run by default do not change when other cases are added or removed."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from case_selector import is_default, unknown_ids
from cases import Case, as_params, can_have, product, skip_unsupported
from source_tree import ROOT

IDS = [case.id for case in product([f"model{number}" for number in range(40)], ("tp2", "pp2vpp2", "cp2"))]
Selector = Callable[[Sequence[str]], set[str]]


def by_hash(ids: Sequence[str]) -> set[str]:
    return {each for each in ids if is_default("test_m", each, 4, ["model7-tp2"])}


def faults_of(select: Selector) -> set[str]:
    """Return the cases that run or not according to which others there are."""
    every = select(IDS)
    fewer = [IDS[1:], IDS[:-1], IDS[::-1], IDS[::3]]
    return {each for ids in fewer for each in select(ids) ^ (every & set(ids))}


def test_other_cases_do_not_change_whether_a_case_runs() -> None:
    assert faults_of(by_hash) == set()
    assert "model7-tp2" in by_hash(IDS)
    assert len(IDS) / 6 < len(by_hash(IDS)) < len(IDS) / 3


PLANTED: dict[str, Selector] = {
    "every fourth": lambda ids: set(ids[::4]),
    "a share of them": lambda ids: set(sorted(ids)[: len(ids) // 4]),
    "by the number of cases": lambda ids: {each for each in ids if is_default(str(len(ids)), each, 4)},
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_selector_that_looks_at_other_cases_is_caught(name: str) -> None:
    assert faults_of(PLANTED[name])


def test_the_hash_is_the_same_in_every_process_and_differs_between_modules() -> None:
    chosen = [each for each in IDS[:30] if is_default("test_m", each, 4)]
    assert chosen == CHOSEN
    assert chosen != [each for each in IDS[:30] if is_default("test_other", each, 4)]
    assert not any(is_default("test_m", each, 0) for each in IDS)


CHOSEN = [
    *("model1-cp2", "model2-tp2", "model3-pp2vpp2", "model5-tp2"),
    *("model6-pp2vpp2", "model6-cp2", "model8-cp2"),
]


def test_unknown_ids_are_found() -> None:
    assert unknown_ids(IDS, ["model7-tp2", "model7-tp3", "model"]) == ["model", "model7-tp3"]


def request_of(*marks: str) -> Any:
    return SimpleNamespace(node=SimpleNamespace(get_closest_marker=lambda name: name in marks or None))


def test_a_default_case_whose_layout_is_not_supported_fails() -> None:
    with pytest.raises(AssertionError, match=r"^runs by default: no such layout"):
        skip_unsupported(request_of("cases"), "no such layout")
    with pytest.raises(pytest.skip.Exception, match="no such layout"):
        skip_unsupported(request_of("cases", "qualify"), "no such layout")


TEST = """
import pytest

@pytest.mark.cases(3, always=[ALWAYS])
@pytest.mark.parametrize("number", range(LAST))
def test_it(number):
    pass
"""


def collected(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-n", "0", "-q", "--collect-only"]
    command += ["--import-mode=importlib", "-m", "not qualify"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300, "env": environment}
    return subprocess.run([*command, *words, str(folder)], cwd=ROOT, **options).stdout


def test_pytest_runs_the_selected_cases_and_names_an_unknown_id(tmp_path: Path) -> None:
    for name, always, last in (("few", "7", 20), ("many", "7", 60), ("wrong", "61", 60)):
        (tmp_path / name).mkdir()
        text = TEST.replace("ALWAYS", repr(always)).replace("LAST", str(last))
        (tmp_path / name / "test_m.py").write_text(text)
    found = collected(tmp_path)
    few, many = (set(re.findall(rf"{name}/test_m.py::test_it\[(\d+)\]", found)) for name in ("few", "many"))
    assert few == {number for number in many if int(number) < 20} and "7" in few
    assert many == {str(number) for number in range(60) if is_default("test_m", str(number), 3, ["7"])}
    assert "test_it: cases(3, always=...) names 61; expected one of 0, 1, 2" in found
    everything = collected(tmp_path / "many", "--cases", "all")
    assert set(re.findall(r"test_it\[(\d+)\]", everything)) == {str(number) for number in range(60)}


def test_a_case_has_a_stable_id_and_counts_once() -> None:
    case = Case("llama", "tp2pp2", ("packed", "bf16"))
    assert (case.id, case.num_ranks) == ("llama-tp2pp2-packed-bf16", 4)
    assert [param.id for param in as_params([case, Case("llama", "tp2"), case])] == [case.id, "llama-tp2"]


def test_a_model_that_cannot_be_split_has_no_pipeline_layout() -> None:
    assert not can_have("gemma4_text-e2b", "tp2pp2")
    assert product(["gemma4_text-e2b", "llama"], ("tp2", "pp2")) == [
        *(Case("gemma4_text-e2b", "tp2"), Case("llama", "tp2"), Case("llama", "pp2")),
    ]
