"""Gradients in fp32 of the factory's models and of transformers against gradients in fp64.

    .venv/bin/python integration_tests/support/fp64_judge.py CASE LAYOUT [SEQUENCES] [LENGTH]

Prints, for each tensor, how far transformers in fp32, and the factory in fp32 and fp64, are from transformers in fp64.
A difference in fp64 is a fault. A difference in fp32 alone is rounding, if transformers' own is about as large.
"""

import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradients import (
    NO_DROPOUT,
    expected_gradients,
    export_gradient,
    export_transformers_gradient,
    is_trained,
)
from harness import run_ranks
from layouts import world_size
from mca_models.megatron.factory import transformer_config
from net.compare import read
from reference import CASES, SIZE, Reference, hf_model, make_reference

Tensors = dict[str, Tensor]
PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager"}
"""Arguments of models in float64, which torch's grouped product does not take."""


class DoublePrecision(TorchFunctionMode):
    """Computes in float64 what a library asks to compute in float32."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = [torch.float64 if x is torch.float32 else x for x in args]
        named = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        found = func(*wide, **named)
        if func is torch.Tensor.type and isinstance(
            found, str
        ):  # Megatron's optimizers know no double tensors
            return found.replace("Double", "Float")
        return found


@contextmanager
def double_precision() -> Iterator[None]:
    """Make models, and compute, in float64 wherever transformers, Megatron or mca name float32.

    Files are read and written outside: what they hold has its own dtype.
    """
    run = torch.autograd._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with DoublePrecision():  # a mode is off while it handles a function, as ``backward`` is one
            return run(*args, **kwargs)

    torch.set_default_dtype(torch.float64)
    try:
        with (
            patch.object(torch.autograd, "_engine_run_backward", run_backward),
            patch.dict(transformer_config.DTYPES, float32=torch.float64),
            DoublePrecision(),
        ):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def in_double(make: Callable[[], Any], weights: Tensors) -> Any:
    """Return the result of ``make`` for a model in float64, its ropes too, with ``weights``."""
    with double_precision():
        model = make()
        model.load_state_dict(weights)
    return model.double().eval()


def double_model(case: str) -> Any:
    """The model of ``case`` in float64."""
    kind, different = CASES[case]
    config = transformers.AutoConfig.for_model(kind, **{**SIZE, **different})
    make = transformers.AutoModelForCausalLM.from_config
    return in_double(lambda: make(config, **PLAIN), hf_model(case).state_dict())


@dataclass(frozen=True)
class Judged:
    """Gradients by name.

    Args:
        truth: Of transformers in fp64.
        theirs: Of transformers in fp32.
        ours: Of the factory in fp32.
        double: Of the factory in fp64.
    """

    truth: Tensors
    theirs: Tensors
    ours: Tensors
    double: Tensors

    def error(self, found: Tensors) -> float:
        """The L2 norm of the difference of all gradients together, relative to that of the gradients."""
        parts = [(found[name].double() - x, x) for name, x in self.truth.items() if is_trained(name)]
        wrong, right = (sum(float(x.square().sum()) for x in each) for each in zip(*parts, strict=True))
        return float((wrong / right) ** 0.5)

    def rows(self) -> Iterator[tuple[str, list[float]]]:
        """Largest and L2 error of each tensor in ``theirs``, ``ours`` and ``double``, relative to the tensor's own."""
        for name, x in self.truth.items():
            if is_trained(name) and x.any():
                wrong = [each[name].double() - x for each in (self.theirs, self.ours, self.double)]
                yield name, [float(f(e) / f(x)) for e in wrong for f in (_largest, torch.linalg.vector_norm)]


def _largest(x: Tensor) -> Tensor:
    return x.abs().max()


def export_both(references: list[Reference], layout: str, folder: Path) -> None:
    """The gradients of each model in fp32 and in fp64. Runs on every rank."""
    warnings.simplefilter("ignore")
    for each in references:
        for name, mode in (("ours", nullcontext()), ("double", double_precision())):
            with mode:
                export_gradient(each, layout, folder / f"{each.model}-{layout}-{name}", **NO_DROPOUT)


def judge(references: list[Reference], layout: str, folder: Path) -> dict[str, Judged]:
    """By case, all gradients of ``references`` on ``layout``."""
    run_ranks(world_size(layout), export_both, references, layout, folder, timeout=300)
    found = {}
    for each in references:
        path = folder / f"{each.model}-truth"
        with double_precision():
            export_transformers_gradient(double_model(each.model), each.input_ids, path)
        ours, double = (read(folder / f"{each.model}-{layout}-{name}") for name in ("ours", "double"))
        found[each.model] = Judged(read(path), read(expected_gradients(each, folder)), ours, double)
    return found


def main(case: str, layout: str, sequences: str = "4", length: str = "24") -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generator = torch.Generator().manual_seed(7)
        ids = torch.randint(0, SIZE["vocab_size"], (int(sequences), int(length)), generator=generator)
        reference = replace(make_reference(case, folder), input_ids=ids)
        judged = judge([reference], layout, folder)[case]
    sys.stdout.write("theirs max, L2; ours max, L2; ours in fp64 max, L2\n")
    rows = sorted(judged.rows(), key=lambda row: -row[1][3])
    for tensor, errors in rows:
        sys.stdout.write(" ".join(f"{error:8.1e}" for error in errors) + f"  {tensor}\n")
    ratio = statistics.geometric_mean(max(errors[3], 1e-12) / max(errors[1], 1e-12) for _, errors in rows)
    total = (judged.error(each) for each in (judged.theirs, judged.ours, judged.double))
    sys.stdout.write("all, L2: theirs {:.1e}, ours {:.1e}, ours in fp64 {:.1e}".format(*total))
    sys.stdout.write(f"; geometric mean of ours / theirs by tensor {ratio:.2f}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
