"""Hide Transformer Engine from a process that computes on the CPU.

If it is installed, Megatron uses its optimizer and its kernels for gradient norms with all layer implementations, and
they run on a GPU only. PEFT, which looks for its layers, may have imported it before, and keeps its references.
"""

import importlib.util
import sys

from mca_models.megatron.platform._patch import CPU, Patch
from mca_models.megatron.types import Upstream

_NAME = "transformer_engine"


def _needed() -> bool:
    return importlib.util.find_spec(_NAME) is not None


def _apply() -> None:
    modules: Upstream = sys.modules
    for name in [_NAME, *(name for name in modules if name.startswith(f"{_NAME}."))]:
        modules[name] = None  # Python treats None as a missing module


PATCH = Patch(
    name="engine-on-cpu",
    why="Megatron takes Transformer Engine's optimizer and kernels where it is installed; they need a GPU",
    megatron=">=0.16.1",
    devices=CPU,
    needed=_needed,
    apply=_apply,
)
