"""Inputs of a step of the kit, and its report.

Every figure and every check is written at once, so that a step that is stopped leaves what it had.
"""

import importlib
import json
import math
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

Device = Literal["cuda", "cpu"]
Layers = Literal["local", "engine"]
IMPLEMENTATION = {"local": "local", "engine": "transformer_engine"}


class LeftOut(Exception):
    """A step cannot be run here, and why."""


@dataclass(frozen=True)
class Check:
    """Something that must hold.

    Args:
        name: What was compared.
        value: What was found.
        limit: What it may be at most.
    """

    name: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        """Return whether it does; not a number is no."""
        return not math.isnan(self.value) and self.value <= self.limit


@dataclass
class Kit:
    """The place of one step.

    Args:
        device: What is computed on.
        tiny: Sizes for a rehearsal.
        scratch: An empty folder of the step's own.
        output: The file that keeps what was found.
    """

    device: Device
    tiny: bool
    scratch: Path
    output: Path
    figures: dict[str, float | str] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)

    def figure(self, name: str, value: float | str) -> None:
        """Keep a figure."""
        self.figures[name] = float(f"{value:.5g}") if isinstance(value, float) else value
        self._keep()

    def check(self, name: str, value: float, limit: float) -> None:
        """Keep whether ``value`` is at most ``limit``; the step goes on either way, and fails at its end."""
        self.checks.append(Check(name, float(value), limit))
        self._keep()

    def holds(self, name: str, truth: bool) -> None:
        """Keep whether something is so."""
        self.check(name, 0.0 if truth else 1.0, 0.0)

    def _keep(self) -> None:
        checks = [
            {"name": each.name, "value": each.value, "limit": each.limit, "holds": each.holds}
            for each in self.checks
        ]
        partial = self.output.with_suffix(".partial")
        partial.write_text(json.dumps({"figures": self.figures, "checks": checks}))
        partial.rename(self.output)

    @property
    def passed(self) -> bool:
        """Return whether all holds, and something was checked."""
        return bool(self.checks) and all(check.holds for check in self.checks)

    def settings(self, layers: Layers) -> dict[str, Any]:
        """The arguments that choose the layers.

        Raises:
            LeftOut: Transformer Engine's are asked for on a CPU without it; on a GPU that is an error of the step.
        """
        if layers == "engine" and self.device == "cpu":
            if find_spec("transformer_engine") is None:
                raise LeftOut("Transformer Engine is not there; see tools/build_transformer_engine.py")
            emulate()
        return {"transformer_impl": IMPLEMENTATION[layers]}

    def synchronise(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()


@cache
def emulate() -> None:
    """Transformer Engine's own classes with arithmetic in plain torch, once in this process."""
    emulated = of_tests("emulated_te")  # before Megatron
    from mca_models.megatron import platform

    platform.prepare()
    emulated.install()


def of_tests(name: str) -> Any:
    """A module of the integration tests, whose references the kit compares with."""
    return importlib.import_module(name)
