"""The faults that `tools/mutate.py` plants, and their draw."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tools import mutate
from tools.mutation.operators import mutations

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


def test_a_fault_keeps_its_identity_when_lines_move(tmp_path):
    planted(tmp_path, "return a < b")
    (before,) = mutations(tmp_path, PATH)
    file = tmp_path / PATH
    file.write_text("import os\n\n\n" + file.read_text())
    (after,) = mutations(tmp_path, PATH)
    assert after.identity == before.identity and after.line == before.line + 3


def test_a_draw_takes_every_subject_and_repeats_itself():
    found = mutate.candidates(["*/engine/[a-m]*", "*/losses/[a-d]*", "*/mca_config/layout.py"])
    some = mutate.drawn(found, 12, seed=3)
    assert some == mutate.drawn(reversed(found), 12, seed=3) != mutate.drawn(found, 12, seed=4)
    assert Counter(mutate.subject_of(each.path) for each in some) == {"layout": 4, "losses": 4, "engine": 4}


def test_every_subject_has_sources():
    paths = [str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/src/**/*.py")]
    assert set(mutate.SUBJECTS) <= {mutate.subject_of(path) for path in paths}


def test_the_cheapest_modules_that_reach_a_function_run_first(tmp_path):
    planted(tmp_path, "return a < b")
    (fault,) = mutations(tmp_path, PATH)
    for name, seconds, functions in (("a", 30, [f"{PATH}:1"]), ("b", 2, [f"{PATH}:1"]), ("c", 1, [])):
        record = {"module": name, "seconds": seconds, "functions": functions}
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    reached = mutate.TestMap(tmp_path)
    assert reached.reaching(fault, limit=100) == ["b", "a"]
    assert reached.reaching(fault, limit=10) == ["b"]


def test_a_fault_is_planted_judged_and_taken_out(tmp_path):
    """The bench on a tree of one package and one test, which sees one of two faults."""
    tree = tmp_path / "tree"
    planted(tree, "return a < b")
    (fault,) = mutations(tree, PATH)
    source = (tree / PATH).read_bytes()
    test = "from mca_made import f\ndef test_f():\n    assert f(1, 2, 0, 0)"
    (tree / PATH).rename(tree / "packages/mca-train/src/mca_made.py")
    ours = replace(fault, path="packages/mca-train/src/mca_made.py")
    for name, more in (("test_seeing.py", " and not f(1, 1, 0, 0)\n"), ("test_blind.py", "\n")):
        (tree / name).write_text(test + more)
    (tree / "test_failing.py").write_text("def test_g():\n    assert False\n")
    bench = mutate.Bench([tree], "not qualify")
    assert bench.judge(ours, ["test_blind.py"], 1).verdict == "survived"
    assert bench.judge(ours, ["test_failing.py"], 1).verdict == "error"
    verdict = bench.judge(ours, ["test_blind.py", "test_seeing.py"], 1)
    assert (verdict.verdict, verdict.test) == ("caught", "test_seeing.py::test_f")
    assert (tree / ours.path).read_bytes() == source
