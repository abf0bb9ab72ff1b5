"""Every language model of transformers is supported or refused by name, and the documentation says so."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mca_config.errors import McaError
from mca_models.templates import FAMILIES, config_from_hf
from mca_models.templates.catalog import REFUSED, SUPPORTED

DOCS = Path(__file__).parents[4] / "docs"


def test_every_causal_language_model_of_transformers_has_a_line() -> None:
    lacking = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - SUPPORTED.keys() - REFUSED.keys()
    assert not lacking, "new in the installed transformers; say in catalog.py why each is not supported"


def test_every_multimodal_language_model_of_transformers_has_a_line() -> None:
    types = {
        kind
        for name in ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ")
        for kind in getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {})
    }
    lacking = types - SUPPORTED.keys() - REFUSED.keys()
    assert not lacking, "new in the installed transformers; say in catalog.py why each is not supported"


def test_a_text_part_that_is_said_to_be_supported_is() -> None:
    reason = "a vision model that mca does not know; its text part is of a supported type"
    named = [kind for kind, why in REFUSED.items() if why == reason and kind in CONFIG_MAPPING_NAMES]
    texts = {kind: CONFIG_MAPPING[kind]().get_text_config(decoder=True).model_type for kind in named}
    assert len(texts) > 10
    assert {kind: text for kind, text in texts.items() if text not in SUPPORTED} == {}


def test_what_is_supported_has_a_template_and_nothing_else_has() -> None:
    assert SUPPORTED.keys() == FAMILIES.keys()
    assert not SUPPORTED.keys() & REFUSED.keys()


def test_which_types_transformers_has() -> None:
    assert {kind for kind in FAMILIES if kind in CONFIG_MAPPING_NAMES} == {
        kind for kind, family in FAMILIES.items() if family.in_transformers
    }


def test_only_the_family_that_is_asked_for_is_imported() -> None:
    program = """
import sys
from mca_models.templates import FAMILIES, FILES, get_family
files = {f"mca_models.templates.{file}" for file in FILES}
assert len(FAMILIES) > 100 and "qwen3_moe" in FAMILIES
assert not files & sys.modules.keys()
get_family("phi")
assert files & sys.modules.keys() == {"mca_models.templates.phi"}
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_examples_of_unsupported_families_are_in_the_catalog() -> None:
    section = (DOCS / "families.md").read_text().partition("\n## Not supported\n")[2].partition("\n## ")[0]
    examples = re.findall(r"`([\w-]+)`", section.partition("|---|---|\n")[2])
    assert len(examples) > 15
    assert set(examples) <= REFUSED.keys()


@pytest.mark.parametrize("kind", ["rwkv", "bert", "hy_v4"])
def test_errors_say_why(kind: str) -> None:
    with pytest.raises(McaError, match="is not supported: ") as error:
        config_from_hf({"model_type": kind})
    assert str(error.value).endswith(REFUSED[kind])


def test_a_listed_type_without_a_file_is_told_from_an_unknown_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FAMILIES, "llama")
    with pytest.raises(McaError, match="'llama' has no file; add it to FILES of"):
        config_from_hf({"model_type": "llama"})
