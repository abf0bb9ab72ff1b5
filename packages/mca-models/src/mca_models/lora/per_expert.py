"""Adapter of stacked experts in the layout of separate linears, which vLLM and SGLang load for most MoE models.

PEFT adapts a stacked parameter with one pair of factors for gate and up (``peft_directory`` describes its matrices).
Here each expert's gate and up have the same lora_A, and their own rows of its lora_B. A model whose checkpoints
have stacked experts too (gpt-oss) has no linears for each expert: engines load PEFT's matrices for it.
"""

from collections.abc import Iterator, Mapping, Sequence

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.lora.adapter import Adapter
from mca_models.lora.peft_directory import PeftTensors
from mca_models.lora.rules import PREFIX, AdapterRules, LoraFactors
from mca_models.lora.targets import Target, linear_targets
from mca_models.storage.copy_plan import HF, Rule, part_shapes
from mca_models.templates.shapes import full_shape
from mca_models.weights import Param
from mca_models.weights.arrays import Array


def per_expert_tensors(adapter: Adapter) -> Iterator[tuple[str, Array]]:
    """Yield the tensors of ``adapter`` by name, those of stacked experts as factors of each expert's linears."""
    import numpy as np

    factors = ExpertFactors(adapter.rules, adapter.model)
    stored = PeftTensors(adapter)
    stacked = {name for _, param in factors.names.values() for name in param.hf_names()}
    for name in sorted(stored.sources.keys() - stacked):
        yield name, stored.array(name)
    for name, (_, param) in factors.names.items():
        for hf, array in factors.split(name, adapter.read(param)).items():
            yield hf, np.ascontiguousarray(array)


def require_per_expert(rules: AdapterRules, model: McaModelConfig) -> None:
    """Check that each adapted expert of ``model`` has separate linears.

    Raises:
        McaError: Its checkpoints have stacked experts.
    """
    _expert_linears(rules, model)


def per_expert_config(document: JsonObject, rules: AdapterRules, model: McaModelConfig) -> JsonObject:
    """Return ``document`` of ``adapter_config.json`` with the experts' linears in ``target_modules``.

    Raises:
        McaError: Experts have several ranks or alphas, or no separate linears.
    """
    linears = _expert_linears(rules, model)
    if not linears:
        return document
    ranks = {(pair.rank, pair.scale) for pair in _stacked(rules)}
    if len(ranks) > 1:
        raise McaError(
            "per_expert: experts have several ranks or alphas (rank_pattern, alpha_pattern); use one"
        )
    names = dict.fromkeys(target.label for targets in linears.values() for target in targets)
    others = dict.fromkeys(pair.target.label for pair in rules.factors if not pair.target.stacked)
    return {**document, "target_modules": [*(others | names)], "target_parameters": None}


def _stacked(rules: AdapterRules) -> Sequence[LoraFactors]:
    return [pair for pair in rules.factors if pair.target.stacked]


def _expert_linears(rules: AdapterRules, model: McaModelConfig) -> Mapping[str, Sequence[Target]]:
    """Return the linears of each adapted expert weight, by its canonical name, in the order of its rows."""
    wanted = {pair.target.base.mca_name() for pair in _stacked(rules)}
    linears: dict[str, list[Target]] = {}
    for target in linear_targets(model) if wanted else ():
        if target.base.expert is not None and target.base.mca_name() in wanted:
            linears.setdefault(target.base.mca_name(), []).append(target)
    if missing := sorted(wanted - linears.keys()):
        raise McaError(
            f"per_expert: {model.model_type} checkpoints have stacked experts ({missing[0]}); "
            "inference engines load PEFT's layout for this model, so remove per_expert"
        )
    return linears


class ExpertFactors:
    """Factors of stacked experts, each of which is split into those of its expert's linears.

    Args:
        rules: Rules of an adapter.
        model: The model.

    Raises:
        McaError: The checkpoints of ``model`` have stacked experts.
    """

    def __init__(self, rules: AdapterRules, model: McaModelConfig) -> None:
        self._model = model
        self._linears = _expert_linears(rules, model)
        self.names: Mapping[str, tuple[LoraFactors, Param]] = {
            param.mca_name(): (pair, param) for pair in _stacked(rules) for param in (pair.a, pair.b)
        }

    def split(self, name: str, full: Array) -> dict[str, Array]:
        """Return the factors of the linears by PEFT's names.

        Args:
            name: Canonical name of one of `names`.
            full: The full tensor.
        """
        pair, param = self.names[name]
        (matrix,) = param.from_full(full)
        first, found = 0, {}
        for target in self._linears[pair.target.base.mca_name()]:
            if param is pair.a:
                found[f"{PREFIX}{target.module}.lora_A.weight"] = matrix
                continue
            shapes = part_shapes(Rule.from_param(target.base), full_shape(target.base, self._model), HF)
            rows = shapes[target.part][0]
            found[f"{PREFIX}{target.module}.lora_B.weight"] = matrix[first : first + rows]
            first += rows
        return found
