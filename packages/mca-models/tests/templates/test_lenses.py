"""Each lens of each family writes what it has read, and families take parts, never each other."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_hf
import transformers

import mca_models.templates
from mca_config.model import DEFAULTS
from mca_models.templates import FAMILIES, config_from_hf
from mca_models.templates.config_table import Lens
from mca_models.templates.parts.moe import AUX_LOSS

FOLDER = Path(mca_models.templates.__file__).parent
PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "published.json").read_text())


TYPES = {name: entry["config"]["model_type"] for name, entry in PUBLISHED.items()}
TEXT = [name for name, kind in TYPES.items() if FAMILIES[kind].vision is None]


def read(name: str) -> dict[str, Any]:
    """Return ``config.json`` of a text model: a published one, or a tiny one as transformers writes it."""
    if name in PUBLISHED:
        config: dict[str, Any] = PUBLISHED[name]["config"]
        return config
    kind, different = tiny_hf.ALL[name]
    return dict(transformers.AutoConfig.for_model(kind, **{**tiny_hf.SIZE, **different}).to_dict())


def broken_lens(hf: dict[str, Any], lens: Lens) -> str | None:
    """Return what ``lens`` does not read again as it wrote it, for the model of ``hf``; None if it does."""
    family = FAMILIES[hf["model_type"]]
    table = family.table
    aliases = {name: hf[alias] for alias, name in table.aliases.items() if alias in hf}
    text = {**table.defaults, **hf, **aliases}
    found = lens.read(text)
    values = {**DEFAULTS, **config_from_hf(hf).to_fields(), **found}
    written = lens.write(values)
    again = lens.read({**text, **written})
    if again != found:
        return f"read {found}, wrote {written}, read {again}"
    rewritten = lens.write({**values, **again})
    return None if rewritten == written else f"wrote {written}, then {rewritten}"


@pytest.mark.parametrize("name", {**tiny_hf.ALL, **dict.fromkeys(TEXT)})
def test_each_lens_reads_what_it_wrote(name: str) -> None:
    hf = read(name)
    problems = [broken_lens(hf, lens) for lens in FAMILIES[hf["model_type"]].table.facts]
    assert not any(problems), problems


def test_a_lens_that_forgets_or_changes_a_fact_is_caught() -> None:
    hf = {**read("qwen3_moe"), "output_router_logits": True}
    lens = AUX_LOSS
    assert broken_lens(hf, lens) is None
    forgetful = Lens(lens.read, lambda values: {**lens.write(values), "output_router_logits": False})
    growing = Lens(lens.read, lambda values: {**lens.write(values), "router_aux_loss_coef": 2.0})
    assert "'moe_aux_loss_coeff': 0.0" in (broken_lens(hf, forgetful) or "")
    assert "'moe_aux_loss_coeff': 2.0" in (broken_lens(hf, growing) or "")


def imported_families(text: str) -> list[str]:
    """Return the families whose files ``text`` imports."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module == mca_models.templates.__name__:
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module.removeprefix(f"{mca_models.templates.__name__}."))
        elif isinstance(node, ast.Import):
            found += [alias.name.removeprefix(f"{mca_models.templates.__name__}.") for alias in node.names]
    return [name for name in found if name in mca_models.templates.FILES]


def test_no_family_imports_another() -> None:
    sources = [*FOLDER.glob("*.py"), *FOLDER.glob("parts/*.py")]
    found = {file.stem: names for file in sources if (names := imported_families(file.read_text()))}
    assert not found, "move what both need to templates/parts"


@pytest.mark.parametrize(
    "text",
    [
        "from mca_models.templates import gpt",
        "from mca_models.templates.gpt import GPT2",
        "import mca_models.templates.gpt",
    ],
)
def test_a_planted_import_is_caught(text: str) -> None:
    assert imported_families(text) == ["gpt"]
