"""Switches of ``config.json`` that families do not support are those that the documentation lists."""

import copy
import fnmatch
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import tiny_hf  # noqa: F401  (registers the classes of kimi_k2 and mimo)
import transformers

from mca_config.errors import McaError
from mca_models.templates import FAMILIES, config_from_hf

DOCS = Path(__file__).parents[4] / "docs"
PAGE = DOCS / "reference" / "unsupported_values.md"
TEXT = [kind for kind, family in FAMILIES.items() if family.vision is None]
GIVEN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"norm_topk_prob": True, "num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
}
"""Values where mca does not support transformers' default model of a family."""
ROW = re.compile(r"^\| ([^|]+) \| `(\w+): (true|false)` \| [^|]+ \|$", re.MULTILINE)
"""A row about one switch: its families and its value."""
SWITCH = re.compile(r"^\| (?!all \|)(.*?) \| `(\w+): (true|false)` \|", re.MULTILINE)
"""The begin of such a row that does not name all families, in any section of a page."""


@cache
def defaults(kind: str) -> dict[str, Any]:
    """Return ``config.json`` of transformers' default model of a family; empty if it has no class for the type."""
    if kind not in transformers.CONFIG_MAPPING:
        return {}
    found: dict[str, Any] = transformers.AutoConfig.for_model(kind, **GIVEN.get(kind, {})).to_dict()
    return found


def rejecting(key: str, value: bool, named: set[str]) -> set[str]:
    """Return the families, of those ``named`` and all with ``key``, whose error names it if it is ``value``."""
    found = set()
    for kind in TEXT:
        if key in defaults(kind) or kind in named:
            try:
                config_from_hf(copy.deepcopy(defaults(kind)) | {key: value})
            except McaError as error:
                found |= {kind} if f"'{key}'" in str(error) else set()
    return found


def listed(cell: str, key: str) -> set[str]:
    """Return the families of a row: those that it names, or all that have the key but those."""
    named = {kind for name in re.findall(r"`([\w*]+)`", cell) for kind in fnmatch.filter(TEXT, name)}
    return {kind for kind in TEXT if key in defaults(kind)} - named if cell.startswith("all that") else named


def rows() -> dict[tuple[str, bool], set[str]]:
    """Return the families of each switch and value of the page."""
    found: dict[tuple[str, bool], set[str]] = defaultdict(set)
    for cell, key, value in ROW.findall(PAGE.read_text()):
        if cell != "all":
            found[key, value == "true"] |= listed(cell, key)
    return found


def test_switches_that_the_page_lists_are_those_that_families_reject() -> None:
    wrong = {
        f"{key}: {value}": (sorted(kinds - found), sorted(found - kinds))
        for (key, value), kinds in rows().items()
        if kinds != (found := rejecting(key, value, kinds))
    }
    assert not wrong, "listed but accepted; rejected but not listed"
    pages = PAGE.read_text() + (DOCS / "families.md").read_text()
    assert set(rows()) == {(key, value == "true") for cell, key, value in SWITCH.findall(pages)}
