"""LoRA adapter: rules of its tensors and a function that reads them, for any format.

Directories are read and written by `peft_directory` and `mca_directory`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from mca_config.errors import McaError, raise_problems
from mca_config.model_config import McaModelConfig
from mca_models.lora.config import AdapterConfig
from mca_models.lora.rules import AdapterRules, LoraFactors, factors_by_weight
from mca_models.storage.copy_plan import HF, Rule, Side, part_shapes
from mca_models.storage.source import Part
from mca_models.storage.values import counts_in
from mca_models.templates.parts.common import EMBEDDING
from mca_models.templates.shapes import full_shape
from mca_models.weights import Param
from mca_models.weights.arrays import Array

TensorReader = Callable[[Param], Array]
PartsFinder = Callable[[Param], tuple[Side, tuple[Part, ...]]]


@dataclass(frozen=True)
class Adapter:
    """One LoRA adapter of one model.

    Args:
        model: The base model; its ``layout`` is the one that ``rules`` were made for.
        config: PEFT's configuration of the adapter.
        rules: Every tensor.
        read: The whole tensor of a rule (without vocabulary padding).
        saved_parts: Where the parts of a parameter that was saved whole are stored, and the side of its rule that they
            are on: rows are read from them, without the whole tensor. None: only ``read`` has the values.
    """

    model: McaModelConfig
    config: AdapterConfig
    rules: AdapterRules
    read: TensorReader
    saved_parts: PartsFinder | None = None

    @property
    def params(self) -> Sequence[Param]:
        """The rules of all tensors, in checkpoint order."""
        return self.rules.params

    @cached_property
    def factors_by_name(self) -> Mapping[str, Sequence[LoraFactors]]:
        """The factors on each Megatron weight, by its canonical name."""
        return factors_by_weight(self.rules.factors)

    @cached_property
    def saved_by_name(self) -> Mapping[str, Param]:
        """Parameters saved whole, by canonical name."""
        return {param.mca_name(): param for param in self.rules.full_params}

    def not_finite(self) -> dict[str, int]:
        """Return the number of infinite and NaN values of each tensor that has any, by PEFT's names."""
        return counts_in((param.hf_names()[0], self.read(param)) for param in self.params)

    def piece(self, param: Param, rank: int, size: int) -> Array:
        """Return the shard of ``param`` on ``rank`` of ``size`` (tp, or etp for an expert)."""
        whole = self.read(param)
        return param.shard.take(_padded(whole, size) if param.vocab else whole, rank, size)


def _padded(whole: Array, size: int) -> Array:
    import numpy as np

    rows = -whole.shape[0] % size
    if not rows:
        return whole
    return np.concatenate([whole, np.zeros((rows, *whole.shape[1:]), whole.dtype)])


def check_shapes(adapter: Adapter, where: object) -> Adapter:
    """``adapter``, once every factor has the rank of its configuration and the size of its linear.

    Raises:
        McaError: Some have not; the first few are named.
    """
    problems = [problem for pair in adapter.rules.factors for problem in _faults(adapter, pair)]
    problems += [fault for param in adapter.rules.full_params for fault in _saved_faults(adapter, param)]
    raise_problems(problems, where, shown=8)
    return adapter


def _faults(adapter: Adapter, pair: LoraFactors) -> list[str]:
    shapes = tuple(adapter.read(pair.a).shape), tuple(adapter.read(pair.b).shape)
    expected = expected_shapes(adapter.model, pair)
    return [
        f"{param.hf_names()[0]} has shape {list(shape)}, expected {list(right)} (rank {pair.rank})"
        for param, shape, right in zip((pair.a, pair.b), shapes, expected, strict=True)
        if shape != right
    ]


def expected_shapes(model: McaModelConfig, pair: LoraFactors) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the full lora_A and lora_B on a target."""
    whole = full_shape(pair.target.base, model)
    rows, columns = part_shapes(Rule.from_param(pair.target.base), whole, HF)[pair.target.part]
    if pair.target.transposed:
        rows, columns = columns, rows
    return (pair.rank, columns), (rows, pair.rank)


def _saved_faults(adapter: Adapter, param: Param) -> list[str]:
    if adapter.saved_parts is not None:
        with suppress(McaError):  # whose reason is found below
            adapter.saved_parts(param)
            return []
    shape, expected = tuple(adapter.read(param).shape), full_shape(param, adapter.model)
    if shape == expected:
        return []
    hint = "; resize the base model's vocabulary first" if param.vocab else ""
    return [f"{param.hf_names()[0]} has shape {list(shape)}, the model's is {list(expected)}{hint}"]


def require_untied(adapter: Adapter, what: str) -> None:
    """Reject ``what`` where a saved embedding would part from its tied output layer.

    Raises:
        McaError: The model is tied and the adapter saved its embedding.
    """
    if adapter.model.head.tie_word_embeddings and any(
        param.mca == EMBEDDING for param in adapter.rules.full_params
    ):
        raise McaError(
            "modules_to_save: embed_tokens is tied to the output layer, which PEFT leaves as it was "
            f"(ensure_weight_tying is not supported); {what} would need an untied model"
        )
