"""A PEFT adapter directory: ``adapter_config.json`` and ``adapter_model.safetensors``.

Stacked expert parameters are kept by PEFT as two matrices for all experts:

    lora_A [experts * rank, in]    the rows of expert 0, of expert 1, ...
    lora_B [out, rank * experts]   column 0 of every expert, column 1 of every expert, ...

and are seen here as ``[experts, rank, in]`` and ``[experts, out, rank]``. vLLM and SGLang load most MoE models in
another layout, with separate linears: each expert's gate and up have the same lora_A, and their own rows of its lora_B.
A model whose checkpoints have stacked experts too (gpt-oss) has no such linears: engines load PEFT's matrices for it.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from mca_config.errors import McaError
from mca_config.files import has_entry, resolve_inside
from mca_config.model.head import HeadKind
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.checkpoint.hf_writer import METADATA
from mca_models.checkpoint.side_files import copy_side_files
from mca_models.lora.adapter import Adapter, check_shapes, expected_shapes
from mca_models.lora.config import FILE_NAME, AdapterConfig
from mca_models.lora.peft_names import ineffective_exclusions, unmatched_entries
from mca_models.lora.rules import PREFIX, AdapterRules, LoraFactors, rules_from_names
from mca_models.lora.targets import Target, linear_targets, unused_modules
from mca_models.storage.atomic import atomic_directory, write_file
from mca_models.storage.copy_plan import HF, Rule, Side, part_shapes
from mca_models.storage.dtypes import dtype_code
from mca_models.storage.safetensors import plan_file, read_header
from mca_models.storage.source import Part, checked_parts, param_part_shapes, require_same_names
from mca_models.storage.writer import SafetensorsWriter
from mca_models.templates import get_family
from mca_models.templates.classification_head import SCORE, Head, with_head
from mca_models.templates.shapes import full_shape
from mca_models.torch_checkpoint.torch_file import read_tensors
from mca_models.weights import Param
from mca_models.weights.arrays import Array

logger = logging.getLogger(__name__)

_TASKS: dict[str, HeadKind] = {"SEQ_CLS": "sequence_classification", "TOKEN_CLS": "token_classification"}
_BASE, _FACTOR = "base_model.model.", re.compile(r"\.lora_[AB]\.weight$")
WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"


def open_peft(path: Path, model: McaModelConfig) -> Adapter:
    """The adapter in ``path``, of ``model``.

    Raises:
        McaError: Its configuration cannot be represented, or its tensors are not those that it names.
    """
    config = AdapterConfig.load(path)
    file, infos = stored_tensors(path)
    refused = sorted(name for name in infos if ".lora_embedding_" in name)
    if refused:
        raise McaError(f"{file}: {refused[0]}: adapters on embeddings are not supported; use modules_to_save")
    _require_adaptable(infos, model, file)
    infos = _without_unused(infos, model, file)
    model = _model_with_head(model, config.document, infos)
    rules = rules_from_names(model, config, infos.keys())
    expected = {name for param in rules.params for name in param.hf_names()}
    require_same_names(infos.keys(), expected, path, f"{file.name} and {FILE_NAME}")
    adapted = [pair.target for pair in rules.factors]
    for problem in (*unmatched_entries(model, config, adapted), *ineffective_exclusions(model, config)):
        logger.warning("%s: %s", path / FILE_NAME, problem)
    stacks = PeftReader(lambda name: infos[name].array(), model.num_experts or 1)

    def saved_parts(param: Param) -> tuple[Side, tuple[Part, ...]]:
        stored = [infos[name] for name in param.hf_names()]
        return HF, checked_parts(param, full_shape(param, model), HF, stored, model.num_experts or 1)

    return check_shapes(Adapter(model, config, rules, stacks.read, saved_parts), file)


def _model_with_head(model: McaModelConfig, adapter: Values, tensors: Values) -> McaModelConfig:
    """``model``, or that with the head which a PEFT adapter holds.

    Args:
        model: The base model.
        adapter: PEFT's configuration.
        tensors: What is stored, by name.
    """
    kind = _TASKS.get(str(adapter.get("task_type")))
    own = next((info for name, info in tensors.items() if name.endswith(f".{SCORE}.weight")), None)
    if kind is None or own is None or model.head.num_labels is not None:
        return model
    labels = tuple(f"LABEL_{number}" for number in range(own.shape[0]))
    return with_head(model, Head(kind=kind, labels=labels))


def _require_adaptable(infos: Values, model: McaModelConfig, file: Path) -> None:
    """Raise if a factor adapts a module that transformers does not call, or whose output an adapter cannot change."""
    unadaptable = get_family(model.model_type).unadaptable
    for name in sorted(infos):
        if (label := _FACTOR.sub("", name).rpartition(".")[2]) in unadaptable:
            raise McaError(
                f"{file}: {name}: adapters on {label} of {model.model_type} have no effect in transformers or fail "
                f"there; train without them: exclude_modules=['{label}'] in PEFT's LoraConfig"
            )


def _without_unused(infos: Values, model: McaModelConfig, file: Path) -> Values:
    """Return ``infos`` without factors on which no feature depends, with a warning."""
    unused = unused_modules(model)
    lost = sorted(name for name in infos if _FACTOR.sub("", name.removeprefix(_BASE)) in unused)
    if lost:
        logger.warning(
            "%s: %d tensors adapt layers of the tower on which no feature of %s depends (%s, ...), and are left out; "
            "to train without them, name the layers in exclude_modules of PEFT's LoraConfig",
            file,
            len(lost),
            model.model_type,
            lost[0],
        )
    return {name: info for name, info in infos.items() if name not in lost}


def stored_tensors(path: Path) -> tuple[Path, Values]:
    """The file that holds the tensors of the adapter in ``path``, and these by name."""
    pickled = not has_entry(path, WEIGHTS) and has_entry(path, PICKLE)
    file = resolve_inside(path, PICKLE if pickled else WEIGHTS)
    return file, read_tensors(file) if pickled else read_header(file).tensors


class PeftReader:
    """Reader of full tensors that splits PEFT's matrices of all experts into stacks.

    Args:
        array: A tensor by its name, as PEFT stores it.
        experts: Of the model.
    """

    def __init__(self, array: Callable[[str], Array], experts: int) -> None:
        self._array, self._experts = array, experts

    def read(self, param: Param) -> Array:
        """The whole tensor of a rule."""
        arrays = [self._array(name) for name in param.hf_names()]
        return param.to_full([self._stack(param, x) for x in arrays] if param.stacked else arrays)

    def _stack(self, param: Param, x: Array) -> Array:
        if x.shape[_stacked_axis(param)] % self._experts:
            raise McaError(
                f"{param.hf_names()[0]}: shape {list(x.shape)} does not divide by {self._experts} experts"
            )
        if _stacked_axis(param) == 0:
            return x.reshape(self._experts, -1, x.shape[1])
        return x.reshape(x.shape[0], -1, self._experts).transpose(2, 0, 1)


def _stacked_axis(param: Param) -> int:
    return 0 if ".lora_A." in param.mca else 1


def peft_shapes(adapter: Adapter) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a PEFT file; none is read."""
    model, found = adapter.model, dict[str, tuple[int, ...]]()
    for pair in adapter.rules.factors:
        for param, shape in zip((pair.a, pair.b), expected_shapes(model, pair), strict=True):
            stored = list(shape)
            if param.stacked:
                stored[_stacked_axis(param)] *= model.num_experts or 1
            found |= dict.fromkeys(param.hf_names(), tuple(stored))
    for param in adapter.rules.full_params:
        shapes = param_part_shapes(param, full_shape(param, model), HF)
        found |= zip(param.hf_names(), shapes, strict=True)
    return found


class PeftTensors:
    """The tensors of a PEFT file, made of those of an adapter.

    Args:
        adapter: Where they come from.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    @cached_property
    def sources(self) -> Mapping[str, tuple[tuple[Param, int], ...]]:
        """For each name the rules that hold it and its place in each: one, or one for each expert."""
        found: dict[str, list[tuple[Param, int]]] = {}
        for param in self._adapter.params:
            for place, name in enumerate(param.hf_names()):
                found.setdefault(name, []).append((param, place))
        return {name: tuple(sources) for name, sources in found.items()}

    def array(self, name: str) -> Array:
        """Tensor ``name`` as PEFT stores it."""
        import numpy as np

        sources = self.sources[name]
        arrays = [param.from_full(self._adapter.read(param))[place] for param, place in sources]
        if not sources[0][0].stacked:
            return np.ascontiguousarray(arrays[0])
        if _stacked_axis(sources[0][0]) == 0:
            return np.concatenate(arrays, 0)
        return np.stack(arrays, 2).reshape(arrays[0].shape[0], -1)


def write_peft(
    adapter: Adapter,
    destination: Path,
    *,
    side_files: Path | None = None,
    overwrite: bool = False,
    proceed: Callable[[Path], None] = lambda path: None,
) -> None:
    """Write a PEFT directory that ``peft`` loads onto the HF model.

    Args:
        adapter: What to write.
        destination: The directory; absent or empty, unless overwritten.
        side_files: Where small files (tokenizer, model card) are copied from.
        overwrite: Replace an existing ``destination``.
        proceed: Called with the written directory before it is put in place; raises to stop.
    """
    tensors = PeftTensors(adapter)
    with atomic_directory(destination, overwrite=overwrite, proceed=proceed) as folder:
        arrays = {name: tensors.array(name) for name in sorted(tensors.sources)}
        specs = [(name, dtype_code(x.dtype), tuple(x.shape)) for name, x in arrays.items()]
        with SafetensorsWriter(plan_file(folder / WEIGHTS, specs, METADATA)) as writer:
            for name, x in arrays.items():
                writer.write(name, x)
        if side_files is not None:
            copy_side_files(side_files, folder)
        write_file(folder / FILE_NAME, adapter.config.to_json().encode())


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
