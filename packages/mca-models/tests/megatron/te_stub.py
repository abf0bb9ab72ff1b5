"""A stand-in for Transformer Engine with its modules' constructors and parameter names, and no computation.

Names and shapes are those of ``transformer_engine.pytorch``: ``weight``, ``bias``, a fused norm's
``layer_norm_weight`` / ``layer_norm_bias``, and ``weight0``, ``weight1``, ... of a grouped linear. Everything else
of the package is a mock. Run as a script it builds parts of models, over process groups that are mocks too, with
Megatron's own Transformer Engine spec, and prints their live names and shapes; the jobs are JSON on the command line.
"""

import importlib.machinery
import json
import os
import sys
import traceback
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

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
        self.eps = k["eps"]
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
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

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


def main(jobs: list[dict[str, Any]]) -> list[Any]:
    """What Megatron builds over the stand-in for every job, or what went wrong."""
    sys.meta_path.insert(0, _Finder())
    import transformer_engine as te
    import transformer_engine.pytorch as te_pytorch

    te.pytorch = te_pytorch
    from mca_models.megatron import virtual_models
    from mca_models.megatron.factory import transformer_config

    for module in (transformer_config, virtual_models):
        module.implementation_of = lambda args: "transformer_engine"
    found: list[Any] = []
    for job in jobs:
        try:
            found.append(build(**job))
        except Exception:
            found.append(traceback.format_exc())
    return found


def build(config: dict[str, Any], arguments: dict[str, Any], ranks: int, rank: int) -> dict[str, Any]:
    """One rank's part of a model; fails unless its names are those of its template.

    Returns:
        ``shapes``: live name to the shape there is and the one that the template gives this rank.
        ``attention``: the classes of core attention.
        ``epsilon``: of the norms that are fused into linears, by the name of the linear.
    """
    from mca_config import DistributingParallelArguments
    from mca_models.megatron import AutoModel, platform
    from mca_models.megatron.distributed import parallel
    from mca_models.templates import config_from_hf

    for kernel in ("FLASH", "FUSED", "UNFUSED"):  # Megatron wants one choice for a whole process
        os.environ.pop(f"NVTE_{kernel}_ATTN", None)
    platform.prepare()
    parallel.stop()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    args = DistributingParallelArguments(**arguments)
    models = AutoModel.from_config(config_from_hf(config), args)
    attention = {
        type(module).__name__
        for name, module in models.named_modules()
        if name.rpartition(".")[2] == "core_attention"
    }
    shapes = {
        item.live: (list(tensor.shape), expected_shape(item.param, models.config, models.place.at))
        for item, tensor in models.held()
    }
    fused = [
        (name, module) for name, module in models.named_modules() if hasattr(module, "layer_norm_weight")
    ]
    epsilon = {name.rpartition(".")[2]: module.eps for name, module in fused}
    return {"shapes": shapes, "attention": sorted(attention), "epsilon": epsilon}


def expected_shape(param: Any, config: Any, at: Any) -> list[int]:
    """The shape of this rank's piece of a parameter, by its template."""
    from mca_models.templates.shapes import whole_shape

    whole = list(whole_shape(param, config))
    if param.vocab:
        whole[0] = config.padded_vocab_size
    rank, size = (at.etp, config.layout.etp) if param.expert is not None else (at.tp, config.layout.tp)
    return list(param.shard.take(torch.empty(whole, device="meta"), rank, size).shape)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")
