"""Facts that pages repeat from the code: numbers of model types, versions, extras, keys, defaults, metrics."""

import dataclasses
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mca_models.templates import FAMILIES
from mca_models.templates.parts.clip_tower import unused_states
from mca_models.templates.parts.vision_tower import VisionModel
from mca_train.reference.keys import Key, task_keys
from mca_train.tasks import TASKS
from source_tree import ROOT, SOURCES

DOCS = ROOT / "docs"
ELSEWHERE = {"families", "other_programs"}
"""Pages with the keys of other programs, or of ``config.json``."""
NO_KEYS = {
    "data": {"prompt"},  # of an entry of `datasets`
    "keys": {"output_router_logits"},  # of config.json
}
"""Words before a colon that are no keys of a run, for each page."""


def keys() -> dict[str, Key]:
    """Return the keys of all jobs."""
    return {key.name: key for task in TASKS.values() for key in task_keys(task)}


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def rows(page: Path, heading: str) -> Iterator[list[str]]:
    """Yield the cells of each row of the table below ``heading``, a row of column names."""
    table = page.read_text().partition(f"{heading}\n")[2].partition("\n\n")[0]
    assert table, f"{page.name} has no table {heading}"
    for line in table.splitlines()[1:]:
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "packages/mca-models/CHANGELOG.md"])
def test_numbers_of_model_types_are_those_of_the_templates(page):
    multimodal = sum(family.vision is not None for family in FAMILIES.values())
    expected = f"{len(FAMILIES) - multimodal} text and {multimodal} multimodal model types"
    assert re.findall(r"\d+ text and \d+ multimodal model types", (ROOT / page).read_text()) == [expected]


TILED = {"tiles", "tile_rows", "tile_breaks", "named_tiles", "row_column_tiles", "word_marks", "word_tiles"}


def test_the_table_of_vision_models_names_the_families_whose_templates_say_so():
    causal = {each.name: each.default for each in dataclasses.fields(VisionModel)}["reach"]
    facts = {
        "no rows of images": lambda vision: vision.image_tokens is None and vision.audio is None,
        "attend in both directions": lambda vision: vision.reach is not causal,
        "vision_feature_layer": lambda vision: getattr(vision.unused, "func", None) is unused_states,
        "tiles have one size": lambda vision: vision.image_tokens in TILED,
    }
    shown = list(rows(DOCS / "families.md", "| subject | in mca |"))
    for phrase, holds in facts.items():
        (named,) = [re.findall(r"`(\w+)`", subject) for subject, text in shown if phrase in text]
        expected = [kind for kind, family in FAMILIES.items() if family.vision and holds(family.vision)]
        assert sorted(named) == sorted(expected), phrase


def _project(package: str) -> dict[str, object]:
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]


def test_versions_of_the_install_page_are_those_of_the_lock_and_the_packages():
    lock = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    models = _project("mca-models")["optional-dependencies"]
    bounds = dict(
        re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", each).groups()
        for each in models["megatron"] + models["te"]
        if ">=" in each
    )
    shown = {cells[0]: cells[1:] for cells in rows(DOCS / "index.md", "| | first | second | accepted |")}
    assert (
        shown.pop("Python")[2] == f"{_project('mca-models')['requires-python'].removeprefix('>=')} or later"
    )
    assert shown.pop("Transformer Engine")[2] == f"{bounds['transformer-engine']} or later"
    assert len(shown) == 4
    for name, (*tested, accepted) in shown.items():
        locked = [each["version"] for each in lock if each["name"] == name.lower()]
        for version in tested:
            assert any(f"{found}.".startswith(f"{version}.") for found in locked), (name, version)
        assert accepted.split()[0] == bounds[name.lower()], name


def test_extras_of_the_install_page_are_those_of_mca_train():
    shown = [cells[0] for cells in rows(DOCS / "index.md", "| extra of `mca-train` | adds |")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(shown))) == sorted(
        _project("mca-train")["optional-dependencies"]
    )


def _quoted_defaults() -> Iterator[tuple[str, str, str]]:
    """Yield page, key and value of each default that a page states."""
    for page in DOCS.glob("*.md"):
        for key, value in re.findall(r"`(\w+)` \(([^()]+) unless set\)", prose(page)):
            yield page.name, key, value
    for key, here, _ in rows(DOCS / "other_programs.md", "| key | default here | there |"):
        if re.fullmatch(r"`\w+`", key):
            yield "other_programs.md", key.strip("`"), here


def test_defaults_that_pages_state_are_those_of_the_keys():
    known, quoted = keys(), list(_quoted_defaults())
    assert len(quoted) >= 7
    wrong = [
        (page, key, value, known[key].default if key in known else "no key")
        for page, key, value in quoted
        if key not in known or float(known[key].default) != float(value.replace(",", ""))
    ]
    assert not wrong


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_keys_that_pages_set_exist(page):
    if page.stem in ELSEWHERE:
        return
    known = {*keys(), *NO_KEYS.get(page.stem, ())}
    named = re.findall(r"`([a-z]\w+): [^`]+`", prose(page))
    assert not {name for name in named if name not in known}


def test_the_page_on_monitoring_has_the_metrics_of_all_jobs_and_no_others():
    page = (DOCS / "scale.md").read_text().partition("## Metrics\n")[2]
    shown = {
        name for line in page.splitlines() for name in re.findall(r"`([\w/]+)`", line.partition(" | ")[0])
    }
    shown -= {"logging_steps"}
    assert not {name for task in TASKS.values() for name in task.metric_names} - shown
    text = "".join(source.text for source in SOURCES)
    shown = {
        re.sub(r"^moe_(?=load|z)|(?<=mtp_)1", "", name) for name in shown
    }  # composed when they are logged
    text = text.replace('f"mtp_{n}_loss"', '"mtp__loss"')
    missing = {name for name in shown if not re.search(rf"[\"'(]{re.escape(name)}[\"')]", text)}
    assert not missing
