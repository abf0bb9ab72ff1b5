"""A stand-in for Transformer Engine with its modules' constructors and parameter names, and no computation.

Names and shapes are those of ``transformer_engine.pytorch``: ``weight``, ``bias``, a fused norm's
``layer_norm_weight`` / ``layer_norm_bias``, and ``weight0``, ``weight1``, ... of a grouped linear. Everything else
of the package is a mock. Run as a script it builds the models whose ``config.json`` contents are given, by case, as
JSON on the command line, with Megatron's own Transformer Engine spec, and prints their live names.
"""

import importlib.machinery
import json
import sys
import traceback
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import torch

VERSION = "2.9.0"


class _Module(torch.nn.Module):
    """Transformer Engine's base class, as Megatron subclasses it."""

    def _add(self, name: str, *shape: int) -> None:
        self.register_parameter(name, torch.nn.Parameter(torch.empty(shape)))

    def set_tensor_parallel_group(self, group: Any) -> None:
        """Nothing to do."""

    def reset_parameters(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""


def _cut(sizes: tuple[int, int], mode: str | None, ranks: int) -> tuple[int, int]:
    inputs, outputs = sizes
    return (inputs // ranks if mode == "row" else inputs, outputs // ranks if mode == "column" else outputs)


class Linear(_Module):
    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, **k: Any) -> None:
        super().__init__()
        inputs, outputs = _cut((in_features, out_features), k.get("parallel_mode"), k.get("tp_size") or 1)
        self.use_bias = bias
        self._add("weight", outputs, inputs)
        if bias:
            self._add("bias", outputs)


class LayerNormLinear(Linear):
    def __init__(self, in_features: int, out_features: int, **k: Any) -> None:
        super().__init__(in_features, out_features, **k)
        self._add("layer_norm_weight", in_features)
        if k.get("normalization", "LayerNorm") == "LayerNorm":
            self._add("layer_norm_bias", in_features)


class GroupedLinear(_Module):
    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, *, bias: bool = True, **k: Any
    ) -> None:
        super().__init__()
        inputs, outputs = _cut((in_features, out_features), k.get("parallel_mode"), k.get("tp_size") or 1)
        self.num_gemms, self.use_bias = num_gemms, bias
        for index in range(num_gemms):
            self._add(f"weight{index}", outputs, inputs)
            if bias:
                self._add(f"bias{index}", outputs)


class RMSNorm(_Module):
    def __init__(
        self, normalized_shape: int | None = None, *, hidden_size: int | None = None, **k: Any
    ) -> None:
        super().__init__()
        self.size = normalized_shape or hidden_size or 0
        self._add("weight", self.size)


class LayerNorm(RMSNorm):
    def __init__(self, *args: Any, **k: Any) -> None:
        super().__init__(*args, **k)
        self._add("bias", self.size)


class DotProductAttention(_Module):
    def __init__(self, num_attention_heads: int, *args: Any, softmax_type: str = "vanilla", **k: Any) -> None:
        super().__init__()
        if softmax_type == "learnable":
            self._add("softmax_offset", num_attention_heads // (k.get("tp_size") or 1))


class _Finder:
    """Finds every module below ``transformer_engine``."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "transformer_engine":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__, module.__version__ = spec, [], VERSION
        if spec.name == "transformer_engine.pytorch":
            for cls in (Linear, LayerNormLinear, GroupedLinear, RMSNorm, LayerNorm, DotProductAttention):
                setattr(module, cls.__name__, cls)
        module.get_cpu_offload_context = lambda *a, **k: (nullcontext(), lambda x: x)
        return module

    def exec_module(self, module: Any) -> None:
        """Nothing to run."""


def main(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Live names and shapes of every model, or what went wrong, as Megatron builds it over the stand-in."""
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
    import transformer_engine as te  # type: ignore[import-not-found]
    import transformer_engine.pytorch as te_pytorch  # type: ignore[import-not-found]

    te.pytorch = te_pytorch
    from mca_models.megatron import transformer_config, virtual_models

    for module in (transformer_config, virtual_models):
        module.implementation_of = lambda args: "transformer_engine"  # type: ignore[attr-defined]
    found: dict[str, Any] = {}
    for case, hf_config in cases.items():
        try:
            found[case] = build(hf_config)
        except Exception:
            found[case] = traceback.format_exc()
    return found


def build(hf_config: dict[str, Any]) -> dict[str, list[int]]:
    """One model's live names; fails unless they are those of its template."""
    from mca_config import DistributingParallelArguments
    from mca_models.megatron import AutoModel
    from mca_models.templates import config_from_hf

    models = AutoModel.from_config(config_from_hf(hf_config), DistributingParallelArguments())
    return {item.live: list(tensor.shape) for item, tensor in models.held()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")
