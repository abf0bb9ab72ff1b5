"""Differences of a case from one process."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from net.case import STEPS, Case
from net.ours import Ours
from net.truth import Truth

GRADIENT, LOSS, NORM, MOVED = 1e-4, 2e-5, 2e-4, 2e-3
ROUGH = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Their delta nets decay by exponentials of sums: ten times more room."""


def differences(case: Case, truth: Truth, ours: list[Ours], folder: Path) -> list[str]:
    """One line for each kind of difference; empty where there is none."""
    room = 10.0 if case.base in ROUGH else 1.0
    found = []
    for key, allowed in (("loss", LOSS), ("grad_norm", NORM), ("eval_loss", LOSS)):
        right = getattr(truth, key)
        for rank, each in enumerate(ours):
            if not _close(right, each.logged[key], allowed * room):
                found.append(f"{key} on rank {rank}: {_figures(each.logged[key])} for {_figures(right)}")
                break
    gradients, after = read(folder / "gradients"), read(folder / "after")
    found += _apart("gradient", gradients, truth.gradients, truth.gradients, GRADIENT * room)
    found += _apart("parameter", after, truth.after, _moved(truth), MOVED * room)
    return found


def largest(truth: Truth, ours: list[Ours], folder: Path) -> dict[str, float]:
    """The largest relative differences, for a table."""
    found = {}
    for key in ("loss", "grad_norm", "eval_loss"):
        pairs = zip(getattr(truth, key), ours[0].logged[key], strict=False)
        found[key] = max((abs(a - b) / abs(a) for a, b in pairs), default=0.0)
    compared = {
        "gradients": (truth.gradients, truth.gradients),
        "after": (truth.after, _moved(truth)),
    }
    for part, (right, scale) in compared.items():
        found[part] = errors(read(folder / part), right, scale)[0][1]
    return found


def _moved(truth: Truth) -> dict[str, Tensor]:
    """Return the change of each parameter, at least the rounding of each step's sum."""
    rounding = STEPS * torch.finfo(torch.float32).eps / MOVED
    return {
        name: (value - truth.before[name]).abs().clamp(min=rounding * float(value.abs().max()))
        for name, value in truth.after.items()
    }


def read(folder: Path) -> dict[str, Tensor]:
    """The tensors of an export."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def errors(
    given: dict[str, Tensor], right: dict[str, Tensor], scale: dict[str, Tensor]
) -> list[tuple[str, float]]:
    """By name, the largest difference as a share of the tensor's largest, or of a thousandth of all; worst first."""
    most = max(float(x.abs().max()) for x in scale.values())
    found = []
    for name, value in right.items():
        if name not in given:
            found.append((f"{name} (absent)", float("inf")))
        elif given[name].shape != value.shape:
            found.append((f"{name} (shape {list(given[name].shape)} for {list(value.shape)})", float("inf")))
        else:
            room = max(float(scale[name].abs().max()), most * 1e-3)
            found.append((name, float((given[name] - value).abs().max()) / room))
    return sorted(found, key=lambda item: -item[1])


def _apart(
    what: str, given: dict[str, Tensor], right: dict[str, Tensor], scale: dict[str, Tensor], allowed: float
) -> list[str]:
    wrong = [(name, error) for name, error in errors(given, right, scale) if not error <= allowed]
    if not wrong:
        return []
    names = ", ".join(f"{name} {error:.1e}" for name, error in wrong[:4])
    return [f"{what}: {len(wrong)} of {len(right)} tensors: {names}"]


def _close(right: list[float], given: list[float], allowed: float) -> bool:
    return len(right) == len(given) and all(
        abs(a - b) <= allowed * abs(a) for a, b in zip(right, given, strict=True)
    )


def _figures(values: list[float]) -> str:
    return " ".join(f"{value:.6g}" for value in values)
