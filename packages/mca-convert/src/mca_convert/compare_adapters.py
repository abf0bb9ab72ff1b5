"""Comparison of two LoRA adapters, PEFT or MCA in any layout, tensor by tensor under PEFT's names.

The base models are not compared.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_config.printable import counted
from mca_convert.compare import Comparison
from mca_models.checkpoint.mca_directory import load_config
from mca_models.checkpoint_kinds import checkpoint_kind
from mca_models.storage.dtypes import dtype_code
from mca_models.weights.arrays import NumpyArray

if TYPE_CHECKING:
    pass

_SCALES = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
_Tensors = Mapping[str, "Callable[[], NumpyArray]"]


def compare_adapters(first: Path, second: Path, *, tolerance: float | None = None) -> Comparison:
    """Compare every element of two adapters, and their scales.

    Args:
        first: One directory.
        second: The other.
        tolerance: Largest absolute difference allowed, and dtypes may differ; None compares bits.

    Raises:
        McaError: One is damaged, or a full model.
    """
    for path, other in ((first, second), (second, first)):
        if not checkpoint_kind(path).is_adapter:
            raise McaError(
                f"{path} is a full model and {other} an adapter; merge the adapter (--merge) to compare models"
            )
    result = Comparison(problems=list(_different_scales(first, second)))
    model = _described_model(first) or _described_model(second)
    mine, its = _tensors(first, model), _tensors(second, model)
    for path, names in ((first, mine.keys() - its.keys()), (second, its.keys() - mine.keys())):
        if names:
            result.problems.append(
                f"{counted(len(names), 'tensor')} only in {path} ({', '.join(sorted(names)[:4])})"
            )
    for name in sorted(mine.keys() & its.keys()):
        _compare(name, mine[name](), its[name](), result, tolerance)
    return result


def _compare(
    name: str,
    mine: NumpyArray,
    its: NumpyArray,
    result: Comparison,
    tolerance: float | None,
) -> None:
    result.tensors += 1
    result.elements += mine.size
    if mine.shape != its.shape:
        result.problems.append(f"{name}: shapes {list(mine.shape)} and {list(its.shape)}")
    elif mine.dtype != its.dtype and tolerance is None:
        codes = f"{dtype_code(mine.dtype)} and {dtype_code(its.dtype)}"
        result.problems.append(f"{name}: {codes} (--tolerance allows this)")
    else:
        result.note(name, mine.shape, [mine.reshape(-1), its.reshape(-1)], tolerance)


def _different_scales(first: Path, second: Path) -> Iterator[str]:
    from mca_models.lora import AdapterConfig

    mine, its = (AdapterConfig.load(path).document for path in (first, second))
    for key in _SCALES:
        default = 8 if key in ("r", "lora_alpha") else None
        if (mine.get(key, default) or None) != (its.get(key, default) or None):
            yield f"adapter_config.json, {key}: {mine.get(key)!r} and {its.get(key)!r}"


def _described_model(path: Path) -> McaModelConfig | None:
    """Return the configuration of the base model, which only an MCA adapter has."""
    from mca_models.lora import is_mca_adapter

    return load_config(path) if is_mca_adapter(path) else None


def _tensors(path: Path, model: McaModelConfig | None) -> _Tensors:
    """Return a reader of each tensor; names are checked against ``model`` if that is known."""
    from mca_models.lora import open_adapter
    from mca_models.lora.peft_directory import PeftTensors, stored_tensors

    if model is None:
        return {name: info.array for name, info in stored_tensors(path)[1].items()}
    tensors = PeftTensors(open_adapter(path, model))
    return {name: partial(tensors.array, name) for name in tensors.sources}
