"""Truth of the READMEs and docs: links resolve, and examples without a model run and give the promised output."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pages import blocks
from source_tree import ROOT

PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("packages/*/*.md"),
    *ROOT.glob("wheelhouse/*.md"),
    *ROOT.glob("examples/**/*.md"),
]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def wrong_values(text: str) -> list[str]:
    """Runs an example; each `expression  # value` in it must have that value (up to a colon)."""
    names: dict[str, object] = {}
    problems = []
    for statement in ast.parse(text).body:
        source = ast.get_source_segment(text, statement) or ""
        if not isinstance(statement, ast.Expr):
            exec(compile(source, "example", "exec"), names)
            continue
        value = eval(source, names)
        line = text.splitlines()[(statement.end_lineno or statement.lineno) - 1]
        if "  # " in line and repr(value) != (promised := line.partition("  # ")[2].partition(": ")[0]):
            problems.append(f"{source} is {value!r}, not {promised}")
    return problems


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_resolve(page):
    targets = [target for target in LINK.findall(page.read_text()) if "://" not in target]
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_every_page_of_the_docs_is_in_the_index():
    linked = set(LINK.findall((ROOT / "docs" / "index.md").read_text()))
    assert not {page.name for page in ROOT.glob("docs/*.md")} - linked - {"index.md"}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_examples_compile(page):
    for text in blocks(page, "python"):
        ast.parse(text)


@pytest.mark.parametrize("package", ["mca-config", "mca-models"])
def test_examples_without_torch_run_as_promised(package):
    texts = blocks(ROOT / "packages" / package / "README.md", "python")
    examples = [text for text in texts if "TrainingArguments" not in text and '"qwen3-mca"' not in text]
    assert examples
    for text in examples:
        assert not wrong_values(text)


def test_a_wrong_promise_is_caught():
    assert wrong_values("x = 1\nx + 1  # 3\n") == ["x + 1 is 2, not 3"]
    assert not wrong_values("x = 1\nx + 1  # 2: as ever\n")


EXAMPLES = re.compile(r"'\w'|\b(?:N|nan|inf)\b|\.\.\.")


def quoted_messages(page: str) -> list[str]:
    """The parts of messages in the first column of a table that hold no name or number of an example."""
    cells = re.findall(r"^\| ([^|]*`[^|]*) \|", page, re.MULTILINE)
    messages = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    parts = [part.strip(" ;?") for message in messages for part in re.split(EXAMPLES, message)]
    return [part for part in parts if part]


def test_the_messages_of_the_page_on_errors_are_those_of_the_programs():
    said = "".join(path.read_text() for path in ROOT.glob("packages/*/src/**/*.py"))
    said = re.sub(r'"\s*\n\s*[rf]*"', "", said)  # strings that go on in the next line
    messages = quoted_messages((ROOT / "docs" / "help.md").read_text())
    assert len(messages) > 8
    assert not [message for message in messages if message not in said]


def test_examples_in_a_message_are_left_out():
    page = "| message | to do |\n|---|---|\n| `no 'x'; did you mean 'y'?`, `N rows ... lost` | `set it` |\n"
    assert quoted_messages(page) == ["no", "did you mean", "rows", "lost"]


def _help(command: str, *arguments: str) -> str:
    program = [str(Path(sys.executable).parent / command), *arguments, "--help"]
    return subprocess.run(
        program, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    ).stdout


def test_flags_of_mca_convert_exist():
    known = set(re.findall(r"--[a-z_0-9]+", _help("mca-convert")))
    said = set()
    for page in PAGES:
        for text in blocks(page, "console"):
            for line in text.replace("\\\n", " ").splitlines():
                if line.startswith("$ mca-convert -"):
                    said |= set(re.findall(r"--[a-z_0-9]+", line))
    assert said and said <= known


KIND_OF = {
    "mixture": "sft",
    "images": "sft",
    "clips": "sft",
    "indexed": "pretrain",
}
"""The kind of run that a file is for, where its name does not say so."""
CONFIGURED = [
    page for page in PAGES if any(re.match(r"# \w+\.yaml\n", text) for text in blocks(page, "yaml"))
]


@pytest.mark.parametrize("page", CONFIGURED, ids=lambda page: page.name)
def test_configuration_files_are_accepted(page, tmp_path, monkeypatch):
    from mca_train.run.settings import load_values, make_settings
    from mca_train.tasks import TASKS

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for text in [text for text in blocks(page, "yaml") if re.match(r"# (\w+)\.yaml\n", text)]:
        (tmp_path / "run.yaml").write_text(text)
        name = text[2:].partition(".")[0]
        kind = KIND_OF.get(name, name)
        values, where = load_values(tmp_path / "run.yaml", ["--output_dir", str(tmp_path / "runs")])
        settings = make_settings(TASKS[kind], values, where)
        assert settings.data.train_file or settings.data.datasets
