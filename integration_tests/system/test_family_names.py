"""No code outside a family's own files asks which family a model is of: what differs is a field of its description."""

import ast
import re

import pytest

from mca_models.templates import FAMILIES, FILES
from source_tree import SOURCES, Source, nodes

TEMPLATES = "mca_models.templates"
TABLES = frozenset({TEMPLATES, f"{TEMPLATES}.catalog", f"{TEMPLATES}.classification_head"})
"""Modules that list families: what they are, what is particular to each or why it is refused, HF's classes of heads."""

LAYERS = frozenset({"mamba"})
"""Families whose name a type of layers has too, in families of other names (`McaModelConfig.layer_types`)."""
NAMES = (frozenset(FAMILIES) | {kind for family in FAMILIES.values() for kind in family.texts}) - LAYERS
_QUOTED = re.compile("['\"](?:" + "|".join(sorted(NAMES)) + ")['\"]")

OWN = {f"{TEMPLATES}.{file}" for file in FILES}
"""The files of the families themselves."""


def named_families(source: Source) -> list[str]:
    """String constants that are a family's name: all of them, in a family's own file those that are compared."""
    if source.module in TABLES or not _QUOTED.search(source.text):
        return []
    places = iter(nodes(source.text))
    if source.module in OWN:
        tests = (node for node in nodes(source.text) if isinstance(node, (ast.Compare, ast.MatchValue)))
        places = (inside for test in tests for inside in ast.walk(test))
    return [
        f"{source.module}:{node.lineno} names the family {node.value}"
        for node in places
        if isinstance(node, ast.Constant) and node.value in NAMES
    ]


def test_no_family_is_asked_for_by_name() -> None:
    found = [problem for source in SOURCES for problem in named_families(source)]
    assert not found, "\n".join(
        [*found, "let the family's own file say what differs, in a field of Family or below"]
    )


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("mca_train.data.media_tokens", 'wanted = config.model_type == "gemma3"'),
        ("mca_models.megatron.factory.chunks", 'if kind in ("bloom", "llama"): pass'),
        ("mca_models.templates.parts.common", 'OWN = {"gpt2": 1}'),
        ("mca_models.templates.phi", 'def f(kind):\n    return kind == "mistral"'),
        ("mca_models.templates.phi", 'match kind:\n    case "llama": pass'),
    ],
)
def test_a_planted_name_is_caught(module: str, text: str) -> None:
    assert named_families(Source(module, text))
