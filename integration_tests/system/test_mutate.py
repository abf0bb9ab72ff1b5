"""The faults that `tools/mutate.py` plants, and their draw."""

import json
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tools import mutate
from tools.mutation.operators import Mutation, mutations
from tools.mutation.reached_tests import TestMap
from tools.mutation.recorder import Plugin, Recorder

from mca_config.printable import suggestion
from source_tree import ROOT

PATH = "packages/mca-train/src/mca_train/losses/made.py"


def planted(root: Path, body: str) -> dict[str, str]:
    """Return operator -> the line with its fault, for a function with ``body``."""
    file = root / PATH
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"def f(a, b, group, x):\n    {body}\n")
    found = {}
    for each in mutations(root, PATH):
        found[each.operator] = each.apply(file.read_bytes()).decode().splitlines()[1].strip()
    return found


@pytest.mark.parametrize(
    ("body", "operator", "fault"),
    [
        ("return a < b", "comparison", "return a <= b"),
        ("return a * b", "dropped factor", "return a"),
        ("return a + b", "dropped term", "return a"),
        ("return a + b", "arithmetic", "return a - b"),
        ("return x[a : b + 1]", "off by one", "return x[a : b + 2]"),
        ("return x.transpose(a, -1)", "axis or index", "return x.transpose(a, 1)"),
        ("dist.all_reduce(x, group=group)", "dropped collective", "pass"),
        ("return group.tp", "wrong group", "return group.cp"),
        ("return x.to(torch.float32)", "wrong dtype", "return x.to(torch.bfloat16)"),
        ("return x.view(a, b)", "exchanged arguments", "return x.view(b, a)"),
        ("return x & ~a", "dropped mask", "return x"),
        ("return a and b", "condition", "return a or b"),
        ("return x.mean()", "opposite function", "return x.sum()"),
    ],
)
def test_each_operator_plants_its_fault(tmp_path, body, operator, fault):
    assert planted(tmp_path, body)[operator] == fault


@pytest.mark.parametrize(
    "body", ['raise ValueError(f"{a + 1}")', 'logger.info("%d", a + 1)', "assert a < b", 'return f"{a + b}"']
)
def test_messages_and_assertions_get_no_fault(tmp_path, body):
    assert not planted(tmp_path, body)


def test_what_only_shows_or_guards_gets_no_fault(tmp_path):
    assert not planted(tmp_path, "return json.dumps(x, indent=2) or zip(a, b, strict=True)").keys() & {
        "off by one",
        "boolean",
    }


def test_equivalent_faults_are_not_drawn(tmp_path, monkeypatch):
    path = "packages/mca-train/src/mca_train/losses/token_loss.py"
    listed = tmp_path / "equivalent.json"
    listed.write_text("{}")
    monkeypatch.setattr(mutate, "EQUIVALENT", listed)
    (first, *others) = mutate.candidates([path])
    listed.write_text(json.dumps({first.identity: "a reason"}))
    assert mutate.candidates([path]) == others


def test_a_fault_keeps_its_identity_when_lines_move(tmp_path):
    planted(tmp_path, "return a < b")
    (before,) = mutations(tmp_path, PATH)
    file = tmp_path / PATH
    file.write_text("import os\n\n\n" + file.read_text())
    (after,) = mutations(tmp_path, PATH)
    assert after.identity == before.identity and after.line == before.line + 3


def test_a_draw_takes_every_subject_and_repeats_itself():
    found = mutate.candidates(["*/engine/[a-m]*", "*/losses/m*", "*/mca_config/layout.py"])
    some = mutate.drawn(found, 12, seed=3)
    assert some == mutate.drawn(reversed(found), 12, seed=3) != mutate.drawn(found, 12, seed=4)
    assert Counter(mutate.subject_of(each.path) for each in some) == {"layout": 4, "losses": 4, "engine": 4}


def test_every_subject_has_sources():
    paths = [str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/src/**/*.py")]
    assert set(mutate.SUBJECTS) <= {mutate.subject_of(path) for path in paths}


def mapped(folder: Path, *records: tuple[str, float, list[str], list[str]]) -> TestMap:
    """Return a map of records (key, seconds, functions, fixtures used)."""
    names = ("key", "seconds", "functions", "uses")
    listed = [
        {"module": each[0].partition("::")[0]} | dict(zip(names, each, strict=True)) for each in records
    ]
    (folder / "map.json").write_text(json.dumps(listed))
    return TestMap(folder, folder)


def test_the_cheapest_tests_that_reach_a_function_run_first(tmp_path):
    planted(tmp_path, "return a < b")
    (fault,) = mutations(tmp_path, PATH)
    reached = [f"{PATH}:f"]
    a, b, c = (
        ("test_a.py::a@test_a", 30, reached, []),
        ("test_b.py::b", 2, reached, []),
        ("test_c.py::c", 1, [], []),
    )
    found = mapped(tmp_path, a, b, c)
    assert found.reaching(fault, limit=100) == ["test_b.py::b", "test_a.py::a"]
    assert found.reaching(fault, limit=10) == ["test_b.py::b"]
    unreached = replace(fault, path="packages/mca-models/src/mca_models/templates/test_c.py")
    assert found.reaching(unreached, limit=10) == ["test_c.py::c"], "named after the file"
    assert found.reaching(replace(fault, function="new"), limit=10) == ["test_b.py::b"], "its file's"
    more = [(f"test_d.py::{number}", 0.1, [f"{PATH}:other"], []) for number in range(2)]
    (tmp_path / "more").mkdir()
    newer = mapped(tmp_path / "more", a, b, *more)
    few = ["test_d.py::0", "test_d.py::1"]
    assert newer.reaching(fault, limit=100) == ["test_b.py::b", "test_a.py::a", *few], "few records"
    many = [(f"test_e.py::{number}", 0.1, reached, []) for number in range(5)]
    assert not {*few} & {*mapped(tmp_path / "more", *many).reaching(fault, limit=100)}
    importer = tmp_path / "packages/mca-train/src/mca_train/losses/importer.py"
    importer.write_text("from mca_train.losses import made, other\n")
    (tmp_path / "second.json").write_text(
        json.dumps(
            [
                {
                    "module": "i",
                    "key": "i::i",
                    "seconds": 1,
                    "functions": [f"{importer.relative_to(tmp_path)}:g"],
                    "uses": [],
                }
            ]
        )
    )
    moved = replace(fault, path=PATH.replace("made", "other"))
    assert TestMap(tmp_path, tmp_path).reaching(moved, limit=10) == ["i::i"], "of a file that imports it"


def test_a_test_that_reaches_few_functions_runs_before_a_broad_one(tmp_path):
    planted(tmp_path, "return a < b")
    (fault,) = mutations(tmp_path, PATH)
    broad = [f"{PATH}:f", *(f"{PATH}:{number}" for number in range(9))]
    found = mapped(tmp_path, ("a::broad", 0.1, broad, []), ("b::narrow", 1, broad[:1], []))
    assert found.reaching(fault, limit=9) == ["b::narrow", "a::broad"]
    assert found.keep(["a::broad"]) == ["b::narrow"]
    assert found.reaching(fault, limit=9) == ["a::broad"], "the other no longer exists"


def test_a_shared_fixture_reaches_a_function_for_each_test_that_uses_it(tmp_path):
    planted(tmp_path, "return a < b")
    (fault,) = mutations(tmp_path, PATH)
    fixture = "test_a.py|trained|None"
    found = mapped(
        tmp_path,
        (fixture, 5, [f"{PATH}:f"], []),
        ("test_a.py::first", 1, [], [fixture]),
        ("test_a.py::second", 2, [], [fixture]),
    )
    assert found.reaching(fault, limit=9) == ["test_a.py::first", "test_a.py::second"]
    assert found.reaching(fault, limit=7) == ["test_a.py::first"]


@pytest.fixture
def bench(tmp_path) -> Iterator[mutate.Bench]:
    """A tree of one package and a few tests, which see one of its faults."""
    tree = tmp_path / "tree"
    source = tree / "packages/mca-train/src/mca_made.py"
    source.parent.mkdir(parents=True)
    source.write_text(
        "def f(a, b):\n    return a < b\n\n\ndef g(a, b):\n    return a < b\n\n\nEARLY = g(1, 1)\n"
    )
    shutil.copytree(ROOT / "tools" / "mutation", tree / "tools" / "mutation")
    for name, line in {
        "blind": "f(1, 2)",
        "seeing": "f(1, 2) and not f(1, 1)",
        "failing": "False",
        "early": "not EARLY",
        "hanging": "f(1, 2) and (f(1, 1) == 0 or __import__('time').sleep(60))",
    }.items():
        (tree / f"test_{name}.py").write_text(
            f"from mca_made import EARLY, f\n\ndef test_f():\n    assert {line}\n"
        )
    bench = mutate.Bench(tree, "not qualify", lambda test: 2 if "hanging" in test else 60)
    yield bench
    bench.close()


def test_a_fault_is_planted_judged_and_taken_out(bench):
    file = bench.tree / "packages/mca-train/src/mca_made.py"
    source = file.read_bytes()
    later, early = mutations(bench.tree, str(file.relative_to(bench.tree)))

    def judge(fault: Mutation, *names: str) -> tuple[str, str]:
        verdict = bench.judge(fault, [f"test_{name}.py::test_f" for name in names])
        return verdict.verdict, verdict.test

    assert judge(later, "blind") == ("survived", "")
    assert judge(later) == ("unreached", "")
    assert judge(later, "failing")[0] == "error"
    assert judge(later, "blind", "seeing") == ("caught", "test_seeing.py::test_f")
    assert judge(later, "failing", "seeing") == ("caught", "test_seeing.py::test_f"), (
        "another test failed before"
    )
    assert judge(later, "blind", "hanging") == ("caught", "test_hanging.py::test_f"), "its time is limited"
    assert judge(early, "blind", "early") == ("caught", "test_early.py::test_f"), "what an import has called"
    assert judge(early, "blind") == ("survived", "")
    assert file.read_bytes() == source
    assert bench.tests == {
        f"test_{name}.py::test_f" for name in ("blind", "seeing", "failing", "early", "hanging")
    }


def test_a_fault_has_the_name_of_its_function_as_code_objects_do(tmp_path):
    file = tmp_path / PATH
    file.parent.mkdir(parents=True)
    file.write_text(
        "class A:\n    def b(self):\n        def c(x):\n            return x < 1\n        return c\n"
    )
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), "made", "exec"), names)
    (function,) = {each.function for each in mutations(tmp_path, PATH)}
    assert function == names["A"]().b().__code__.co_qualname == "A.b.<locals>.c"


def test_the_map_records_new_tests_and_keeps_the_others(tmp_path, monkeypatch):
    ran = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        ran.append([Path(each[1:]).read_text() if each.startswith("@") else each for each in command])
        return subprocess.CompletedProcess(command, 0, "a.py::known\na.py::new\n\n2 tests collected\n")

    monkeypatch.setattr(mutate.subprocess, "run", run)
    mapped(tmp_path, ("a.py::known", 1, [], []))
    assert mutate.record_map(tmp_path, ["-n", "0"]) == 0
    assert ran[1][-3:] == ["-n", "0", "a.py::new"]


def test_a_test_is_recorded_after_one_that_ended_the_tracing():
    recorder = Recorder()
    item = SimpleNamespace(path=ROOT / "a.py", nodeid="a.py::test_a")
    before = sys.gettrace(), threading.gettrace()
    try:
        sys.settrace(None)
        protocol = Plugin(recorder).pytest_runtest_protocol(item)
        next(protocol)
        suggestion("layuot", ["layout"], "")
        protocol.close()
    finally:
        sys.settrace(before[0])
        threading.settrace(before[1])
    assert "suggestion" in {code.co_name for code in recorder.reached["a.py::test_a"]}
