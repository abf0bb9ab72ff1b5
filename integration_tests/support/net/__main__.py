"""Prints a line for each case as it comes, and a summary; 1 if one is wrong."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import conftest  # noqa: F401  (makes shared modules of the packages' tests importable)

from net.drawing import draw
from net.run import verdicts
from net.tally import coverage, summary


def main(words: list[str]) -> int:
    """From the first to before the last number."""
    first, last = int(words[0]) if words else 0, int(words[1]) if len(words) > 1 else 400
    seed = int(os.environ.get("MCA_NET_SEED", "0"))
    found, began = [], time.monotonic()
    for verdict in verdicts(draw(seed, number) for number in range(first, last)):
        found.append(verdict)
        sys.stdout.write(f"{verdict}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{time.monotonic() - began:.0f} s\n{summary(found)}\n\n{coverage(found)}\n")
    return int(any(verdict.wrong for verdict in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
