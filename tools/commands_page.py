"""Writes docs/commands.md: what every command answers to ``--help``. Run as ``uv run tools/commands_page.py``."""

import contextlib
import io
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"
COMMANDS = (
    "mca-train",
    "mca-train plan",
    "mca-train data",
    "mca-train tokenize",
    "mca-train report",
    "mca-train init",
    "mca-train schema",
    "mca-train completion",
    "mca-convert",
    "mca-convert plan",
    "mca-convert inspect",
    "mca-convert verify",
    "mca-convert completion",
)
_HEAD = """# Commands

This page shows what each command prints for `--help`; `tools/commands_page.py` writes it. [Keys](keys.md) lists the
keys of the commands that train.

Flags are written with `-` or `_`. A misspelt command or flag is an error that names the one you probably meant. Wrong
usage ends with exit code 2, any other failure with 1. `--version` prints the version.
`mca-train completion bash` and `mca-convert completion bash` (or `zsh`, `fish`) print scripts for your shell.

## JSON

`--json` prints one object with `schema` and `version`. Keys change only with the version, which is 1. Sizes are bytes.

| schema | key | meaning |
|---|---|---|
| `mca-train/plan` | `possible`, `problems` | whether any machine could make the run, and why not |
| | `missing` | what this machine lacks |
| | `model` | `model_type`, `layers`, `parameters`, `trained_parameters` (null: all) |
| | `world_size`, `layout_sizes`, `data_parallel_size` | ranks and sizes |
| | `implementation` | whose layers were counted: `local` or `transformer_engine` |
| | `global_batch`, `tokens_per_step`, `bubble`, `images`, `videos`, `clips` | of a step |
| | `device` | with `--device`: its name and memory |
| | `stages[]` | columns of a stage, `evaluation`, `beforehand`, `worst_routing`, `host`; with a device `fits` |
| | `remedies[]` | `changes`, `bytes` of the fullest stage, `fits` |
| | `dry_run` | with `--dry_run`: an object of schema `mca-train/dry-run` |
| `mca-train/search` | `gpus`, `samples_per_step`, `device`, `efficiency` | what was searched for |
| | `layouts[]` | `changes`, `layout_sizes`, `time` (seconds by part) |
| | | `tokens_per_second_and_device`, `bytes` |
| | `checked`, `refused[]` | layouts that went through the check, and what it found |
| `mca-train/report` | `runs[]` | one for each directory: |
| | `name` | of the directory |
| | `began`, `task`, `world_size`, `layout` | as in `run.json`; null where it has none |
| | `configuration`, `versions`, `plan` | the same |
| | `seconds` | from the first log to the last |
| | `measured_bytes` | the most that a rank has held since `began` |
| | `curves` | `[step, value]` of everything that was logged |
| | `checkpoints[]` | `name`, `bytes` |
| `mca-convert/plan`, `.../inspect`, `.../verify` | `layout_sizes` | sizes of the layout (`inspect`: `sizes.layout`) |
| | `sizes` | sizes of the model |
| | `same`, `problems`, `differences` | of `verify` |
| | `not_finite` | number of infinite and NaN values of each tensor |
| | `refusals`, `notes`, `facts`, `holds` | text for people |
"""


def page() -> str:
    """The whole document, by running the commands of this environment."""
    return _HEAD + "".join(f"\n## `{name}`\n\n```text\n{_help(name)}```\n" for name in COMMANDS)


def _help(name: str) -> str:
    from mca_convert.cli import main as convert
    from mca_train.cli import main as train

    program, *words = name.split()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        (convert if program == "mca-convert" else train)([*words, "--help"])
    return said.getvalue()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
