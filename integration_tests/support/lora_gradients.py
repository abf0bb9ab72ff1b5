"""Logits and gradients of adapters: peft's, and those of the factory's models on ranks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from layouts import arguments
from lora_cases import CASES
from lora_training import adapter_of, megatron_gradients, tokens
from reference import make_reference

TOLERANCE = 1e-4  # of the largest element of a tensor's gradient
WIDER = {"gemma4_text-e2b": 2e-4}
"""Rounding of both sides: in L2, transformers is 3.2e-5 from its own gradients in fp64 there, and the factory 2.2e-5.

On one processor the largest difference of the two was 1.005e-4 at tp 2, in ``layers.0.mlp.down_proj``.
"""

Found = tuple[torch.Tensor, dict[str, torch.Tensor] | None] | str
"""Logits and gradients, or why there are none."""


def gradients(jobs: list[tuple[Path, Path, str]], **settings: Any) -> list[Found]:
    """Return the gradients of each adapter on its base and layout. Runs on every rank."""
    from mca_models.megatron import AutoModel
    from mca_models.megatron.peft import load_adapter

    found: list[Found] = []
    for base, adapter, layout in jobs:
        try:
            models = load_adapter(AutoModel.from_pretrained(base, arguments(layout, **settings)), adapter)
            found.append((models.logits(tokens()), megatron_gradients(models)))
        except Exception as error:  # the same on every rank: go on with the other models
            found.append(f"{type(error).__name__}: {error}")
    return found


@dataclass(frozen=True)
class Expected:
    """Result of ``peft`` for a case."""

    base: Path
    adapter: Path
    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]


def expected_of(case: str, folder: Path) -> Expected:
    """The adapter of ``case``, made under ``folder``."""
    base_case, settings = CASES[case]
    base = make_reference(base_case, folder).path
    theirs = adapter_of(base, folder / f"{case}-peft", settings, train=False)
    return Expected(base, theirs["adapter"], theirs["before"], theirs["gradients"])


def assert_equal_pefts(theirs: Expected, ours: Found, tolerance: float = TOLERANCE) -> None:
    assert not isinstance(ours, str), ours
    logits, gradients = ours
    assert float((logits - theirs.logits).abs().max()) < 1e-4
    assert gradients is not None
    assert gradients.keys() == theirs.gradients.keys()
    for name, gradient in theirs.gradients.items():
        largest = float(gradient.abs().max())
        assert largest > 0
        assert float((gradients[name] - gradient).abs().max()) < tolerance * largest, name
