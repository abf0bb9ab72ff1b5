"""A report is one page that needs nothing else, and shows what the run's files hold."""

import json
import os
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mca_train.cli import main
from mca_train.report import read_run, write_report

BROWSER = next(
    (found for name in ("chromium", "google-chrome", "chrome") if (found := shutil.which(name))), None
)
VOID = {"meta", "br", "line", "circle", "rect", "polyline"}


class Structure(HTMLParser):
    """Every element is closed in order, and none asks for anything outside the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.wanted: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.wanted += [value for name, value in attrs if name in ("src", "href", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def a_run(folder: Path, loss: float) -> Path:
    (folder / "checkpoint-2").mkdir(parents=True)
    (folder / "checkpoint-2" / "weights").write_bytes(b"0" * 1024)
    lines = [
        {"step": step, "time": 10.0 * step, "loss": loss / step, "grad_norm": 1.0, "peak_memory_gib": 0.5}
        for step in (1, 2, 3)
    ]
    lines.append({"step": 3, "time": 31.0, "eval_loss": float("nan"), "moe_balance": 1.25})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "train_log.jsonl").write_text(text + '{"step": 4, "lo')
    record = {
        "task": "sft",
        "world_size": 4,
        "layout": "tp 2 pp 2",
        "configuration": {"learning_rate": 1e-3, "note": "<script>alert(1)</script>"},
        "versions": {"torch": "2"},
        "plan": {"stages": [{"weights": 1 << 28, "activations": 1 << 28}]},
    }
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def test_a_page_has_curves_memory_checkpoints_and_configuration(tmp_path, capsys):
    folder = a_run(tmp_path / "one", 6.0)
    assert write_report(folder) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    text = (folder / "report.html").read_text()
    page = Structure(text)
    assert (page.open, page.wanted) == ([], [])
    assert (
        page.counts["svg"] == 5
    )  # loss, grad_norm, peak memory, balance; stages. A curve of nan alone is none.
    assert "script" not in page.counts
    for said in (
        "moe_balance",
        "checkpoint-2",
        "learning_rate",
        "tp 2 pp 2",
        "planned 0.5 GiB",
        "measured 0.5 GiB",
    ):
        assert said in text, said


def test_two_runs_stand_beside_each_other(tmp_path):
    one, other = a_run(tmp_path / "one", 6.0), a_run(tmp_path / "other", 9.0)
    out = tmp_path / "both.html"
    assert write_report(one, compare=str(other), output=str(out)) == 0
    text = out.read_text()
    page = Structure(text)
    assert page.counts["polyline"] == 2 * 4
    assert "<th>one</th><th>other</th>" in text


def test_a_run_whose_record_was_cut_is_shown_without_it(tmp_path):
    folder = a_run(tmp_path / "one", 6.0)
    (folder / "run.json").write_bytes(b'{"task": "sft", "layout": "\xff')
    assert write_report(folder) == 0
    text = (folder / "report.html").read_text()
    assert "unknown" in text
    assert "moe_balance" in text


@pytest.mark.parametrize("nothing", [None, [], {"stages": None}])
def test_a_record_that_holds_nothing_of_a_part_is_shown_without_it(nothing, tmp_path):
    folder = a_run(tmp_path / "one", 6.0)
    (folder / "run.json").write_text(json.dumps({"plan": nothing, "configuration": nothing}))
    assert write_report(folder) == 0
    assert "planned memory" not in (folder / "report.html").read_text()


@pytest.mark.parametrize("late", ["weights", "training"])
def test_a_checkpoint_that_is_deleted_meanwhile_is_left_out(late, tmp_path, monkeypatch):
    folder = a_run(tmp_path / "one", 6.0)
    (folder / "checkpoint-1/training").mkdir(parents=True)
    for name in ("checkpoint-1/weights", "checkpoint-1/training/part"):
        (folder / name).write_bytes(b"0")
    stat, scandir, doomed = os.stat, os.scandir, folder / "checkpoint-1" / late

    def vanishing(call):
        def other(path=".", **options):
            if Path(path) == doomed:
                raise FileNotFoundError(path)
            return call(path, **options)

        return other

    monkeypatch.setattr(os, "stat", vanishing(stat))
    monkeypatch.setattr(os, "scandir", vanishing(scandir))
    run = read_run(folder)
    monkeypatch.undo()
    assert run.checkpoints == [("checkpoint-2", 1024)]


def test_what_was_measured_is_of_the_layout_that_was_planned(tmp_path):
    folder = a_run(tmp_path / "one", 6.0)
    log = folder / "train_log.jsonl"
    log.write_text(log.read_text().replace('"peak_memory_gib": 0.5', '"peak_memory_gib": 0.75', 1))
    record = json.loads((folder / "run.json").read_text())
    for began, measured in ((None, 0.75), (15.0, 0.5), (99.0, None)):
        (folder / "run.json").write_text(json.dumps(record | {"began": began}))
        assert read_run(folder).peak == measured
        write_report(folder)
        assert ("measured" in (folder / "report.html").read_text()) == (measured is not None)


def test_what_is_no_run_is_refused(tmp_path, capsys):
    run = str(a_run(tmp_path / "run", 1.0))
    for words, said in [
        (["--output", "x"], "needs the output_dir"),
        ([str(tmp_path)], "has no train_log.jsonl"),
        ([run, "--compared", "x"], "unknown flag --compared; did you mean --compare?"),
        ([run, "--output", str(tmp_path / "no" / "where")], "cannot be written"),
    ]:
        assert main(["report", *words]) == 2
        assert said in capsys.readouterr().err


def test_planned_memory_is_the_total_of_the_plan(tmp_path):
    folder = a_run(tmp_path / "one", 6.0)
    record = json.loads((folder / "run.json").read_text())
    record["plan"]["stages"].append({"weights": 1 << 29, "total": 13 << 30})
    (folder / "run.json").write_text(json.dumps(record))
    write_report(folder)
    text = (folder / "report.html").read_text()
    assert "planned 13 GiB on the fullest rank" in text
    assert "evaluation, or a reference computed first: 12.5 GiB" in text
    assert ">0.5 GiB</text>" in text and ">13 GiB</text>" in text, "the ends of the bars of both stages"


def test_the_same_is_printed_as_one_object(tmp_path, capsys):
    one, other = a_run(tmp_path / "one", 6.0), a_run(tmp_path / "other", 9.0)
    (other / "run.json").unlink()
    assert main(["report", str(one), "--compare", str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (found["schema"], found["version"]) == ("mca-train/report", 1)
    first, second = found["runs"]
    assert first.keys() == second.keys()
    assert [run["name"] for run in found["runs"]] == ["one", "other"]
    record = json.loads((one / "run.json").read_text())
    assert {name: first[name] for name in record} == record
    assert [second[name] for name in record] == [None] * len(record)
    assert first["curves"]["loss"] == [[1.0, 6.0], [2.0, 3.0], [3.0, 2.0]]
    assert first["curves"]["eval_loss"] == [[3.0, None]], "not a number"
    assert (first["measured_bytes"], first["seconds"]) == (1 << 29, 21.0)
    assert first["checkpoints"] == [{"name": "checkpoint-2", "bytes": 1024}]
    assert not (one / "report.html").exists()
    page = (Path(__file__).parents[4] / "docs/reference/json.md").read_text()
    assert all(f"`{name}" in page for name in {*found, *first}), "docs/reference/json.md lists the keys"
    assert main(["report", str(one), "--json", "--output", "x"]) == 2
    assert "--json prints the report and writes no page; leave out --output" in capsys.readouterr().err


class Shown(HTMLParser):
    """Text of a page without its style, and the number of its curves."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.headings: list[str] = []
        self.curves = 0
        self._within = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._within = tag
        self.curves += tag == "polyline"

    def handle_data(self, data):
        if self._within == "h2":
            self.headings.append(data.strip())
        elif self._within != "style":
            self.words.append(data.strip())

    def handle_endtag(self, tag):
        self._within = ""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed here")
def test_a_browser_shows_the_page_of_two_runs(tmp_path):
    one, other = a_run(tmp_path / "one", 6.0), a_run(tmp_path / "other", 9.0)
    page, picture = tmp_path / "both.html", tmp_path / "page.png"
    write_report(one, compare=str(other), output=str(page))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,1600"]

    def browse(*more: str) -> bytes:
        command = [BROWSER, *flags, *more, page.as_uri()]
        return subprocess.run(command, check=True, timeout=120, stdout=subprocess.PIPE).stdout

    shown = Shown(browse("--dump-dom").decode())
    assert shown.headings == ["Overview", "Curves", "Memory", "Checkpoints", "Configuration", "Versions"]
    assert shown.curves == 2 * 4, "loss, gradient norm, memory and balance of both runs"
    for said in (
        "one and other",
        "planned memory, one",
        "planned memory, other",
        "moe_balance",
        "learning_rate",
    ):
        assert any(said in word for word in shown.words), said
    for run in ("one", "other"):
        assert shown.words.count(run) >= 4, f"{run} heads a column of each table, and its row of checkpoints"
    browse(f"--screenshot={picture}")
    assert picture.stat().st_size > 20_000
