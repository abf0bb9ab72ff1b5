"""Site of the documentation: links out of it become text, and every page is in the navigation."""

import importlib
import importlib.util
import itertools
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from mca_config.reference import update_document

ROOT = Path(__file__).resolve().parents[2]


def _tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_out_of_the_documentation_become_text():
    read = _tool("site_links").on_page_markdown
    assert read("see [the script](../examples/train.slurm).") == "see the script (`examples/train.slurm`)."
    assert read("[`tools/lock.py`](../tools/lock.py)") == "`tools/lock.py`"
    assert read("[`lock.py`](../tools/lock.py)") == "`tools/lock.py`"
    assert read("[Training](training.md#data)") == "[Training](training.md#data)"


def test_links_from_a_folder_of_the_documentation_stay():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="validation/evidence.md"))
    read = partial(_tool("site_links").on_page_markdown, page=page)
    assert read("[Plan](../scale.md#search)") == "[Plan](../scale.md#search)"
    assert read("[the lock](../../tools/lock.py)") == "the lock (`tools/lock.py`)"


def test_a_bar_in_the_code_of_a_table_is_shown_without_its_backslash():
    read = _tool("site_links").on_page_markdown
    assert read(r"| `a \| b` | c \| d |") == r"| `a | b` | c \| d |"
    assert read(r"outside of tables `a \| b`") == r"outside of tables `a \| b`"


def test_every_page_has_a_place_in_the_site():
    site = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r"(\w+\.md)", site))
    assert named == {page.name for page in ROOT.glob("docs/*.md")}
    settings = yaml.safe_load(site)
    assert settings["strict"] is True
    assert settings["theme"]["font"] is False  # nothing is fetched from elsewhere


def test_the_python_reference_lists_exactly_the_public_names():
    page = (ROOT / "docs" / "python.md").read_text()
    listed = re.findall(r"^::: (\w+)\.(\w+)$", page, re.MULTILINE)
    public = []
    for name in ("mca_config", "mca_convert", "mca_models", "mca_train"):
        package = importlib.import_module(name)
        assert package.__all__ == sorted(package.__all__)
        assert all(getattr(package, each).__doc__ for each in package.__all__)
        public += [(name, each) for each in package.__all__]
    assert sorted(listed) == public
    assert page.count("\n::: ") == len(listed)
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    paths = settings["plugins"][1]["mkdocstrings"]["handlers"]["python"]["paths"]
    assert {f"packages/{name.replace('_', '-')}/src" for name, _ in public} == set(paths)


def test_the_page_of_commands_is_what_they_say(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    tool = _tool("commands_page")
    text = tool.page()
    assert "--dry_run" in text
    assert "--checkpoint_path" in text
    assert text == tool.PAGE.read_text(), "uv run tools/commands_page.py"
    tables, _, commands = text.partition("<!-- commands -->")
    for name in tool.COMMANDS:
        section = commands.partition(f"### `{name}`\n")[2].partition("\n### ")[0]
        flags = [(found[1], found[0]) for found in tool.FLAG.finditer(tool.help_text(name))]
        named = {*re.findall(r"^  --(\w+)", section, re.MULTILINE), *re.findall(r"`--(\w+)`", section)}
        assert {flag for flag, _ in flags} <= named
        assert [
            flag for flag, meaning in flags if f"| `{flag}` |" not in tables and meaning not in commands
        ] == []


@pytest.mark.parametrize(
    ("page", "table", "kind"),
    [
        ("families.md", "supported_table", "llama"),
        ("reference/unsupported_types.md", "refused_table", "rwkv"),
    ],
)
def test_the_documented_families_are_those_of_the_catalog(page, table, kind):
    tool = _tool("families_page")
    text = (ROOT / "docs" / page).read_text()
    assert ROOT / "docs" / page in tool.PAGES
    assert update_document(text, tool.TABLES) == text, "uv run tools/families_page.py"
    assert getattr(tool, table)() in text
    assert update_document(text.replace(f"`{kind}`", "`lama`"), tool.TABLES) == text


def test_the_pictures_of_the_documents_are_those_of_the_tool():
    tool = _tool("concept_pictures")
    pages = "".join(page.read_text() for page in ROOT.glob("docs/*.md"))
    for name, draw in tool.PICTURES.items():
        assert (tool.FOLDER / f"{name}.svg").read_text() == draw().svg(), "uv run tools/concept_pictures.py"
        assert f"pictures/{name}.svg" in pages, name


WIDEST = 7.2
"""Pixels of a character of text in the pictures, in the widest of the usual fonts (DejaVu Sans)."""


def _extents(picture):
    """Left and right end of each text, by the height of its line."""
    lines = {}
    for x, y, anchor, words in re.findall(
        r'<text x="(\S+)" y="(\S+)" text-anchor="(\w+)"[^>]*>([^<]*)<', picture
    ):
        width = WIDEST * len(words)
        left = float(x) - {"start": 0, "middle": width / 2, "end": width}[anchor]
        lines.setdefault(y, []).append((left, left + width, words))
    return {y: sorted(texts) for y, texts in lines.items()}


def test_texts_of_pictures_do_not_overlap():
    """Fonts of readers differ: the legend of a schedule once covered its words."""
    for name in _tool("concept_pictures").PICTURES:
        picture = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text()
        edge = float(re.search(r' width="(\d+)"', picture)[1])
        bottom = float(re.search(r' height="(\d+)"', picture)[1])
        for y, texts in _extents(picture).items():
            assert float(y) + 5 <= bottom, (name, texts)
            assert texts[0][0] >= 0 and texts[-1][1] <= edge, (name, texts)
            for (_, right, words), (left, _, following) in itertools.pairwise(texts):
                assert right <= left, (name, words, following)


def test_pictures_follow_a_dark_page_and_long_tables_a_narrow_one():
    css = (ROOT / "docs" / "assets" / "extra.css").read_text()
    assert '[data-md-color-scheme="slate"] .md-typeset img[src$=".svg"]' in css
    assert css.count("{") == css.count("}")
    keys = (ROOT / "docs" / "keys.md").read_text()
    assert keys.startswith("# Keys and commands\n")
    assert "h1#keys-and-commands)" in css  # the style sheet finds the page by its heading
    headers = re.findall(r"^\| (?:key|argument) \|(.*)\|$", keys, re.MULTILINE)
    assert " value | default | meaning " in headers  # the columns that the style sheet turns into paragraphs


LOOKED_UP = {"keys.md", "families.md"}
"""Pages of long tables, in which a reader looks one line up."""
LONGEST = 600
"""Words of a page about one subject, as each job is."""
JOINED = {
    "contribute.md": 1350,
    "convert.md": 950,
    "data.md": 810,
    "index.md": 990,
    "other_programs.md": 1170,
    "python.md": 1300,
    "scale.md": 1750,
}
"""Words of the pages with several subjects, each below its own heading."""


def hand_written_words(text: str) -> int:
    """Count the words of a page outside of code and generated tables."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!-- (?!end)(.*?) -->.*?<!-- end \1 -->", "", text, flags=re.DOTALL)
    return sum(bool(re.search(r"\w", word)) for word in text.replace("|", " ").split())


def test_a_page_can_be_read_in_one_go():
    counts = {page.name: hand_written_words(page.read_text()) for page in ROOT.glob("docs/*.md")}
    assert {name for name, count in counts.items() if count > LONGEST} == LOOKED_UP | JOINED.keys()
    assert not {name: counts[name] for name, most in JOINED.items() if counts[name] > most}


def test_words_of_code_and_of_generated_tables_are_not_counted():
    page = "# Two words\n```yaml\na: b\n```\n<!-- t -->\n| x | y |\n<!-- end t -->\n| a `b` | - |\n"
    assert hand_written_words(page) == 4
