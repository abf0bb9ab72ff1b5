"""docs/keys.md says what the code does: its tables, its picture, its example file."""

import re
from pathlib import Path

import yaml

from mca_config import McaError, ParallelLayout, TrainingArguments, pipeline_plan, reference
from mca_config.reference import update_document

DOCUMENT = Path(__file__).parents[3] / "docs" / "keys.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")


def block(before: str, language: str = "") -> str:
    found = re.search(before + rf".*?```{language}\n(.*?)\n```", TEXT, flags=re.DOTALL)
    assert found, before
    return found[1]


def test_the_tables_are_up_to_date() -> None:
    assert update_document(TEXT, reference.TABLES) == TEXT, "run: python -m mca_config.reference docs/keys.md"
    for _, options in reference.LEVELS:
        assert reference.argument_table(options) in TEXT


def test_a_stale_table_is_noticed() -> None:
    assert update_document(TEXT.replace("| `fp8` |", "| `fp9` |"), reference.TABLES) == TEXT


def test_the_picture_is_what_the_string_means() -> None:
    layout = ParallelLayout(
        pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout=block("<!-- example: pp 2, layers 10, mtp 1 -->"),
    )
    assert str(pipeline_plan(layout, 10, 1)) == block("<!-- picture -->")


def test_the_example_file_is_accepted() -> None:
    given = yaml.safe_load(block("A switch takes", "yaml"))
    args = TrainingArguments(use_cpu=True, **given)
    assert args.grid(8).data_parallel_size == 2


def test_plans_print_as_tables() -> None:
    plan = pipeline_plan(
        ParallelLayout(pipeline_model_parallel_size=3, pipeline_model_parallel_layout="E||ttL"), 2
    )
    assert str(plan).splitlines() == ["pp 0  embedding", "pp 1  (empty)", "pp 2  layers 0-1, loss"]
    assert issubclass(McaError, ValueError)


def test_cells_of_tables_show_their_text_as_it_is():
    """Asterisks of a layout string, ``Et*3|t*4``, once became emphasis on the page."""
    assert reference.cell("Et*3|t*4, <none>") == r"Et\*3\|t\*4, &lt;none>"
    plain = re.sub(r"```.*?```|`[^`\n]*`|\*\*", "", TEXT, flags=re.DOTALL)
    assert not re.search(r"(?<!\\)\*", plain)
