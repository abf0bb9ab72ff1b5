"""Write the result of one stage of ``.ci/qualify`` into docs/validation/evidence.md, with commit, date and machine."""

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "validation" / "evidence.md"
BEGIN, END = "<!-- qualified -->\n", "<!-- end of qualified -->\n"
HEAD = "| stage | result | commit | date | seconds | cores |\n|---|---|---|---|---|---|\n"


def written(page: str, stage: str, *facts: str) -> str:
    """Return ``page`` with a row for ``stage`` in the table between its two marks, in place of an older row."""
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    kept = {row.split("|")[1].strip(): row for row in rows}
    kept[stage] = "| " + " | ".join((stage, *facts)) + " |"
    return f"{before}{BEGIN}{HEAD}" + "".join(f"{row}\n" for row in kept.values()) + f"{END}{after}"


def main(stage: str, result: str, seconds: str) -> None:
    """Rewrite the page."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=PAGE.parent, capture_output=True, text=True, check=True
    ).stdout.strip()
    facts = (result, commit, f"{datetime.now(UTC):%Y-%m-%d}", seconds, str(os.cpu_count()))
    PAGE.write_text(written(PAGE.read_text(), stage, *facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
