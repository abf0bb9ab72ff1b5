"""Write the stages that ``.ci/qualify`` ran into docs/validation/evidence.md, with commit, date and machine."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "validation" / "evidence.md"
BEGIN, END = "<!-- qualified -->\n", "<!-- end of qualified -->\n"


def written(page: str, stages: list[str], heading: str) -> str:
    """Return ``page`` with a list of ``stages`` between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{heading}\n\n" + "".join(f"- {stage}\n" for stage in stages) + f"{END}{after}"


def main(stages: list[str]) -> None:
    """Rewrite the page."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=PAGE.parent, capture_output=True, text=True, check=True
    ).stdout.strip()
    heading = f"Commit {commit}, {datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, {platform.machine()}:"
    PAGE.write_text(written(PAGE.read_text(), [stage for stage in stages if stage], heading))


if __name__ == "__main__":
    main(sys.argv[1:])
