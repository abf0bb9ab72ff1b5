"""Layout of a HF checkpoint that is to be written: files, index, and the position of each tensor.

Callers write the tensors' bytes through `mca_models.storage`.
"""

import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.checkpoint.hf_directory import CONFIG, INDEX, SINGLE
from mca_models.checkpoint.placement import stored_params
from mca_models.quantization.fp8 import CODE, SCALE_CODE, SCALE_SUFFIX, fp8_quantization_config, scale_shape
from mca_models.quantization.hf_tensors import is_linear
from mca_models.storage.atomic import write_file
from mca_models.storage.byte_ranges import Shape
from mca_models.storage.copy_plan import HF
from mca_models.storage.dtypes import ITEM_SIZES
from mca_models.storage.source import param_part_shapes
from mca_models.templates import config_to_hf, get_family
from mca_models.weights import Param, Stage

MAX_SHARD_BYTES = 5 * 10**9
METADATA = {"format": "pt"}  # transformers refuses files without it


class HfTensors:
    """All tensors of a HF checkpoint, in the order of the parameters.

    Args:
        params: All parameters of the model.
        config: Of the model.
        dtypes: Safetensors code of each parameter, by canonical name.
        wholes: Whole shape of each, without vocabulary padding.
        fp8: Weights of linears as blocks of fp8.

    Raises:
        McaError: transformers could not read this family's weights in fp8.

    Attributes:
        tensors: Dtype code and shape of each tensor.
        scales: The tensor with the scales of each one in fp8.
        duplicates: Tensors that the source held twice and that are written twice again: {copy: original}.
    """

    def __init__(
        self,
        params: Iterable[Param],
        config: McaModelConfig,
        dtypes: Mapping[str, str],
        wholes: Mapping[str, Shape],
        *,
        fp8: bool = False,
    ) -> None:
        self.params, self.config = stored_params(params), config
        self.scales: dict[str, str] = {}
        if fp8 and (why := get_family(config.model_type).text(config).fp8_unsupported):
            raise McaError(
                f"fp8: transformers reads no fp8 blocks of {config.model_type} models ({why}); leave fp8 out"
            )
        linears = (
            [param for param in self.params if is_linear(param, wholes[param.mca_name()])] if fp8 else []
        )
        self._linears = {name for param in linears for name in param.hf_names()}
        self.tensors: dict[str, tuple[str, Shape]] = {}
        for param in self.params:
            name = param.mca_name()
            self._add(param, dtypes[name], wholes[name])
        known = get_family(config.model_type).duplicated_hf_tensors(config)
        self.duplicates = {
            name: known[name] for name in config.extra.get("hf_duplicates", ()) if name in known
        }
        self.tensors |= {name: self.tensors[other] for name, other in self.duplicates.items()}

    def _add(self, param: Param, dtype: str, whole: Shape) -> None:
        experts = self.config.num_experts
        for name, shape in zip(param.hf_names(), param_part_shapes(param, whole, HF), strict=True):
            full = (experts, *shape) if param.stacked else shape
            spec = (CODE if name in self._linears else dtype, full)
            if self.tensors.setdefault(name, spec) != spec:
                raise McaError(f"{name}: parameters disagree about its type or shape")
            if name in self._linears:
                self.scales[name] = name + SCALE_SUFFIX
                self.tensors[name + SCALE_SUFFIX] = (SCALE_CODE, scale_shape(full))

    def written_as(self, name: str) -> tuple[str, ...]:
        """Return ``name`` and every tensor that is written as a copy of it: a tied model's head."""
        return (name, *(copy for copy, other in self.duplicates.items() if other == name))


class HfLayout(HfTensors):
    """All tensors of a HF checkpoint and the files they go to, before any byte is written.

    A file is closed when the next tensor would take it over ``max_shard_bytes``; the other arguments are those of
    `HfTensors`.

    Raises:
        McaError: As `HfTensors`, or ``config.json`` cannot be written.

    Attributes:
        config_text: The contents of ``config.json``.
        files: Names of the tensors of each file.
    """

    def __init__(
        self,
        params: Iterable[Param],
        config: McaModelConfig,
        dtypes: Mapping[str, str],
        wholes: Mapping[str, Shape],
        max_shard_bytes: int = MAX_SHARD_BYTES,
        *,
        fp8: bool = False,
    ) -> None:
        super().__init__(params, config, dtypes, wholes, fp8=fp8)
        self.config_text = config_text(config, self._quantization(wholes) if fp8 else None)
        self.files = self._shards(max_shard_bytes)

    def _quantization(self, wholes: Mapping[str, Shape]) -> JsonObject:
        """Return the ``quantization_config``, with the matrices outside of the embedding that are not quantised."""
        vision = get_family(self.config.model_type).vision
        left_out = {
            name.removesuffix(".weight"): None
            for param in self.params
            for name in (*param.hf_names(), *(vision.split_names(param) if vision else ()))
            if len(wholes[param.mca_name()]) == 2
            and name not in self._linears
            and param.stage is not Stage.FIRST
        }
        return {"quantization_config": fp8_quantization_config(list(left_out))}

    def _shards(self, limit: int) -> dict[str, list[str]]:
        shards: list[list[str]] = [[]]
        filled = 0
        scales = set(self.scales.values())  # a scale is stored and written next to its weight
        for name, (dtype, shape) in self.tensors.items():
            nbytes = prod(shape) * ITEM_SIZES[dtype]
            if filled and filled + nbytes > limit and name not in scales:
                shards.append([])
                filled = 0
            shards[-1].append(name)
            filled += nbytes
        if len(shards) == 1:
            return {SINGLE: shards[0]}
        count = len(shards)
        return {f"model-{i:05d}-of-{count:05d}.safetensors": names for i, names in enumerate(shards, 1)}

    def specs(self, file: str) -> list[tuple[str, str, Shape]]:
        """Return the arguments of ``plan_file`` for ``file`` (with ``METADATA``): (name, dtype code, shape)."""
        return [(name, *self.tensors[name]) for name in self.files[file]]

    def finish(self, directory: Path) -> dict[str, int]:
        """Write ``config.json`` and, with several files, the index into ``directory``; returns their sizes."""
        small = self.small_files()
        return {name: write_file(directory / name, content) for name, content in small.items()}

    def small_files(self) -> dict[str, bytes]:
        """Return the contents of the files that `finish` writes, by name."""
        if len(self.files) == 1:
            return {CONFIG: self.config_text}
        total = sum(prod(shape) * ITEM_SIZES[dtype] for dtype, shape in self.tensors.values())
        weight_map = {name: file for file, names in self.files.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        return {CONFIG: self.config_text, INDEX: json.dumps(index, indent=2).encode() + b"\n"}


def config_text(config: McaModelConfig, more: JsonObject | None = None) -> bytes:
    """The contents of ``config.json``: made before any weight is written, as it may be that it cannot be."""
    return json.dumps(config_to_hf(config) | (more or {}), indent=2, ensure_ascii=False).encode() + b"\n"
