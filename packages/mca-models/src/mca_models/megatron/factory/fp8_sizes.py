"""Whether Transformer Engine can compute the products of a built model in fp8: its kernels want multiples in all sizes.

Tokens are padded to them (`mca_config.checks.fp8_token_multiple`);
the sizes of matrices follow from the model and the layout.
"""

from collections.abc import Iterator

import torch

from mca_config.checks import fp8_token_multiple
from mca_config.errors import raise_problems
from mca_models.megatron.types import MegatronConfig, Upstream


def require_fp8_sizes(model: torch.nn.Module, megatron: MegatronConfig) -> None:
    """Raise one error with all matrices of this rank that cannot be multiplied in fp8, if that is asked for."""
    if not megatron.fp8:
        return
    multiple = fp8_token_multiple(megatron.fp8, megatron.fp8_recipe)
    problems = [
        f"{name} is {' x '.join(map(str, shape))} on each tensor rank, and fp8 needs multiples of {multiple}; change "
        "tensor_model_parallel_size or fp8_recipe, or remove fp8"
        for name, shape in _matrices(model, megatron)
        if any(size % multiple for size in shape)
    ]
    raise_problems(problems, "this model cannot be computed in fp8", shown=5)


def _matrices(model: torch.nn.Module, megatron: MegatronConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Those that Transformer Engine multiplies with in fp8: of the layers that do not stay in bf16."""
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    plain: set[str] = set()
    modules: Iterator[tuple[str, Upstream]] = model.named_modules()
    for name, module in modules:
        parent = name.rpartition(".")[0]
        layer = getattr(module, "layer_number", 0) - 1 if parent.endswith("decoder.layers") else -1
        if parent in plain or is_first_last_bf16_layer(megatron, layer):
            plain.add(name)
        elif hasattr(module, "fp8_meta"):
            for of, tensor in module.named_parameters(recurse=False):
                if tensor.dim() == 2:
                    yield f"{name}.{of}", tuple(tensor.shape)
