"""The steps of the kit, in the order in which they run, and the process of one of them.

    python -m tools.gpu_kit.steps NAME SCRATCH OUTPUT cuda|cpu [--tiny]      # what run.py starts

Exit code 0: all checks hold; 1: one does not, or the step broke; 3: it cannot be run here, and stderr says why.
"""

import argparse
import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.gpu_kit.kit import Kit, LeftOut

LEFT_OUT = 3


@dataclass(frozen=True)
class Step:
    """One step.

    Args:
        name: What it is called.
        call: ``module:function`` of this package, which takes a `Kit` and ``options``.
        part: The command in which it runs.
        seconds: How long it may take.
        least: What steps before it leave it of the part's time.
        options: Of the call.
        exact: Products of fp32 matrices are of all their bits.
    """

    name: str
    call: str
    part: int
    seconds: int
    least: int = 30
    options: dict[str, Any] = field(default_factory=dict)
    exact: bool = False

    def run(self, kit: Kit) -> None:
        """Run it in this process."""
        module, _, function = self.call.partition(":")
        getattr(importlib.import_module(f"tools.gpu_kit.{module}"), function)(kit, **self.options)


def _both(
    name: str, call: str, part: int, seconds: int, *, exact: bool, least: int = 30, **options: Any
) -> list[Step]:
    """A step for each kind of layers."""
    return [
        Step(f"{name}-{layers}", call, part, seconds, least, {"layers": layers, **options}, exact)
        for layers in ("local", "engine")
    ]


def _speed(size: str, part: int) -> list[Step]:
    """A step for each rival."""
    return [
        Step(f"speed-{size}-{rival}", "speed:speed", part, 110, 60, {"size": size, "rival": rival})
        for rival in ("bare", "hf")
    ]


STEPS: tuple[Step, ...] = (
    Step("smoke", "smoke:smoke", 1, 90),
    *_both("parity-fp32", "parity:fp32", 1, 100, exact=True, least=45),
    *_both("parity-bf16", "parity:bf16", 1, 80, exact=False),
    *_both("packing", "packing:packing", 1, 60, exact=True),
    *_both("lora", "packing:lora", 1, 60, exact=True),
    *_both("files", "files:files", 1, 120, exact=True, least=75),
    Step("memory", "memory:memory", 2, 150, least=90),
    *_speed("0.6b", 2),
    *_speed("1.7b", 2),
    *_speed("8b-shape", 3),
    Step("stream", "stream:stream", 3, 60, least=60),
    Step("kinds", "kinds:kinds", 3, 120, least=90),
    Step("fusions", "speed:fusions", 3, 120, least=60),
    Step("tests", "pytest_step:gpu_tests", 3, 240, least=90, exact=True),
    *_both("parity-more", "parity:fp32", 3, 100, exact=True, more=True),
)


def step_of(name: str) -> Step:
    """The step of that name."""
    return next(step for step in STEPS if step.name == name)


def main() -> int:
    """Run one step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=[step.name for step in STEPS])
    parser.add_argument("scratch", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    kit = Kit(args.device, args.tiny, args.scratch, args.output)
    try:
        step_of(args.name).run(kit)
    except LeftOut as reason:
        print(reason, file=sys.stderr)
        return LEFT_OUT
    return int(not kit.passed)


if __name__ == "__main__":
    sys.exit(main())
