"""A Hugging Face checkpoint directory: ``config.json`` and one or more safetensors files.

It is read here and never written (`hf_writer`). Pickled weights are found by `torch_checkpoint`.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import prod
from pathlib import Path, PurePosixPath
from typing import TypeVar

from mca_config.errors import HfConfigError, McaError, raise_problems, with_location
from mca_config.files import has_entry, read_json, resolve_inside
from mca_config.model_config import McaModelConfig
from mca_config.printable import counted
from mca_config.types import JsonObject
from mca_models.checkpoint.placement import stored_params
from mca_models.quantization.hf_tensors import (
    config_without_quantization,
    is_linear,
    read_quantization_config,
)
from mca_models.storage.byte_ranges import Shape
from mca_models.storage.copy_plan import HF, Side
from mca_models.storage.dtypes import CODES, DTYPE_NAMES, ITEM_SIZES
from mca_models.storage.safetensors import TensorInfo, read_header
from mca_models.storage.source import (
    ComputedTensor,
    ModelSource,
    Part,
    checked_parts,
    first_few,
    param_part_shapes,
    require_same_names,
)
from mca_models.templates import config_from_hf, get_family
from mca_models.templates.config_table import QUANTIZATION
from mca_models.templates.shapes import full_shape
from mca_models.weights import Param

logger = logging.getLogger(__name__)

StoredTensor = TensorInfo | ComputedTensor
_SHOWN = 8
CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
Tensor = TypeVar("Tensor", bound=StoredTensor)


class HfSourceBase(ModelSource):
    """Base of sources whose parts are Hugging Face tensors; subclasses fill the attributes."""

    _infos: Mapping[str, StoredTensor]
    _parts: Mapping[str, tuple[Part, ...]]
    _wholes: Mapping[str, Shape]

    def tensors(self) -> Iterable[StoredTensor]:
        """All tensors of the directory, those without weights (computed buffers) included."""
        return self._infos.values()

    def full_shape(self, param: Param) -> Shape:
        """Return the full shape of ``param``, without vocabulary padding."""
        return self._wholes[param.mca_name()]

    def side(self, param: Param) -> Side:
        """Return the side of ``param``'s rule that its parts are on."""
        return HF

    def parts(self, param: Param) -> tuple[Part, ...]:
        """Return the parts that hold ``param``, in the side's order."""
        return self._parts[param.mca_name()]


_FREQUENCIES = ".rotary_emb.inv_freq"
"""Buffer that old files of many families hold in each layer; nothing reads it."""


class HfSource(HfSourceBase):
    """A HF directory, opened: every tensor that its configuration demands is there, with its shape.

    Quantised weights (fp8 in blocks, mxfp4) are read dequantised.

    Args:
        path: The directory.
        dtype: Safetensors code that quantised weights are read as; None: the dtype of ``config.json``.
        tensors: What is stored, if not in safetensors.

    Raises:
        McaError: Files or tensors are missing, unexpected, damaged or of another shape (all are named).
    """

    def __init__(
        self, path: Path, dtype: str | None = None, tensors: Sequence[StoredTensor] | None = None
    ) -> None:
        self.path = path
        hf_config = read_config(path)
        self.stored: Sequence[StoredTensor] = _all_tensors(path) if tensors is None else tensors
        self._infos, hf_config = _plain(path, hf_config, self.stored, dtype)
        with named_config_errors(path):
            config = config_from_hf(hf_config)
        family = get_family(config.model_type)
        _require_plausible(path, config, self.stored)
        self.config: McaModelConfig = family.with_checkpoint_names(
            config, self._infos.keys(), {name: info.shape for name, info in self._infos.items()}
        )
        self.params: Sequence[Param] = stored_params(family.params(self.config))
        self._require_names()
        self._wholes = {param.mca_name(): full_shape(param, self.config) for param in self.params}
        self._parts = self._all_parts()

    def _all_parts(self) -> dict[str, tuple[Part, ...]]:
        parts, faults = dict[str, tuple[Part, ...]](), list[str]()
        for param in self.params:
            try:
                parts[param.mca_name()] = self._checked(param)
            except McaError as error:
                faults.append(str(error))
        raise_problems(faults, self.path, shown=_SHOWN)
        return parts

    def _require_names(self) -> None:
        family = get_family(self.config.model_type)
        expected = {name for param in self.params for name in param.hf_names()}
        optional = family.ignored_hf(self.config) | self.duplicates.keys()
        optional |= {name for name in self._infos if name.endswith(_FREQUENCIES)}
        require_same_names(self._infos.keys() - (optional - expected), expected, self.path)

    def _checked(self, param: Param) -> tuple[Part, ...]:
        infos = [self._infos[name] for name in param.hf_names()]
        return checked_parts(param, self.full_shape(param), HF, infos, self.config.num_experts)

    @cached_property
    def duplicates(self) -> dict[str, str]:
        """Tensors that are present though they repeat another one, and which: a tied model's head."""
        known = get_family(self.config.model_type).duplicated_hf_tensors(self.config)
        return {name: other for name, other in known.items() if name in self._infos}

    def check_duplicates(self) -> None:
        """Raise if a repeated tensor differs from the one it repeats. Reads both."""
        for name, other in self.duplicates.items():
            first, second = self._infos[name], self._infos[other]
            if not same_bytes(first, second):
                raise McaError(
                    f"{first.file}: tensor {name} must repeat {other} in this model (tied), but differs from "
                    "it; if the two are meant to differ, set tie_word_embeddings to false in config.json"
                )


def _require_plausible(path: Path, config: McaModelConfig, tensors: Sequence[StoredTensor]) -> None:
    """Raise if there are not even as many bytes as layers and experts, whose names would fill all memory."""
    experts, nbytes = config.num_experts or 1, sum(info.nbytes for info in tensors)
    if config.num_layers * experts * config.hidden_size > 2 * nbytes:  # a weight takes at least half a byte
        raise McaError(
            f"{path / CONFIG}: {config.num_layers} layers of {experts} MLPs do not fit into {nbytes} bytes of weights; "
            "the checkpoint and its config.json do not agree"
        )


def _plain(
    path: Path, hf_config: JsonObject, tensors: Sequence[StoredTensor], dtype: str | None
) -> tuple[dict[str, StoredTensor], JsonObject]:
    """The tensors as they are without quantisation, and the configuration likewise."""
    found = {info.name: info for info in tensors}
    if read_quantization_config(hf_config) is None:
        return dict(found), hf_config
    from mca_models.quantization.hf_tensors import dequantize

    plain = {name: info for name, info in found.items() if isinstance(info, TensorInfo)}
    if len(plain) < len(found):
        raise McaError(f"{path}: quantised weights with strides are not read; take the model's safetensors")
    with named_config_errors(path):
        read = dequantize(plain, hf_config, dtype or config_dtype(hf_config))
    if all(isinstance(tensor, TensorInfo) for tensor in read.values()):
        logger.warning(
            "%s has %s, but no tensor is quantised; tensors are read as they are stored. Remove the key: other "
            "programs would dequantise them",
            path / CONFIG,
            QUANTIZATION,
        )
    return dict(read), dequantized_config(hf_config, dtype)


@contextmanager
def named_config_errors(path: Path) -> Iterator[None]:
    """Errors name the ``config.json`` of directory ``path``."""
    try:
        yield
    except HfConfigError as error:
        raise McaError(str(path / str(error))) from None
    except McaError as error:
        raise with_location(error, path / CONFIG) from None


def config_dtype(hf_config: JsonObject) -> str:
    """Safetensors code of what ``config.json`` gives as the model's dtype."""
    return CODES.get(str(hf_config.get("dtype") or hf_config.get("torch_dtype")), "BF16")


def dequantized_config(hf_config: JsonObject, dtype: str | None = None) -> JsonObject:
    """``config.json`` of the model as it is read, whose quantised weights are read as ``dtype``; see `HfSource`."""
    if read_quantization_config(hf_config) is None:
        return hf_config
    return config_without_quantization(hf_config, DTYPE_NAMES[dtype or config_dtype(hf_config)])


def has_weights(path: Path) -> bool:
    """Return whether there are any weight files in ``path``, readable ones or not."""
    return any(any(path.glob(f"*{end}")) for end in (".safetensors", ".safetensors.index.json", ".bin"))


def same_bytes(first: StoredTensor, second: StoredTensor, chunk: int = 8 << 20) -> bool:
    """Return whether two tensors have the same type, shape and bytes."""
    import numpy as np

    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    a, b = (info.array().reshape(-1).view(np.uint8) for info in (first, second))
    return all(np.array_equal(a[i : i + chunk], b[i : i + chunk]) for i in range(0, a.size, chunk))


def read_config(path: Path) -> JsonObject:
    """The parsed ``config.json`` of directory ``path``."""
    if not path.is_dir():
        raise McaError(f"{path}: no such directory; expected a Hugging Face or MCA checkpoint directory")
    absent = "the directory is no Hugging Face checkpoint"
    if not has_entry(path, CONFIG) and not has_weights(path):
        absent += f": it {what}" if (what := _what_else(path)).startswith(("holds", "looks")) else ""
    return read_json(resolve_inside(path, CONFIG), absent)


def _all_tensors(path: Path) -> list[TensorInfo]:
    if has_entry(path, SINGLE):
        return list(read_header(resolve_inside(path, SINGLE)).tensors.values())
    if has_entry(path, INDEX):
        return indexed_tensors(path, INDEX, lambda file: read_header(file).tensors)
    if binaries := sorted(file.name for file in path.glob("*.bin")):
        raise McaError(
            f"{path}: holds {binaries[0]}, but neither {SINGLE} nor {PICKLED} nor an index of either; name the "
            "weights so, or fetch the index too"
        )
    raise McaError(f"{path}: {_what_else(path)}")


def _what_else(path: Path) -> str:
    """Describe a directory without Hugging Face weights, and the remedy."""
    names = sorted(file.name for file in path.iterdir())
    shards = [name for name in names if name.endswith(".safetensors")]
    if shards:
        what = f"{counted(len(shards), 'file')} of weights ({shards[0]}{', ...' * (len(shards) > 1)})"
        return f"holds {what}, but {INDEX} is missing; fetch it too"
    if any(name == "latest_checkpointed_iteration.txt" or name.startswith("iter_") for name in names):
        distributed = [
            name for name in names if name.startswith("iter_") and has_entry(path / name, ".metadata")
        ]
        otherwise = f", or name its {distributed[-1]}" if distributed else ""
        what = "looks like a checkpoint of MCA or Megatron, but mca_config.json is missing"
        return f"{what}; put it back there{otherwise}"
    if other := [name for name in names if name.endswith((".gguf", ".pth", ".h5", ".msgpack", ".onnx"))]:
        return f"holds {other[0]}, a format that is not read; take the model's safetensors"
    return f"neither {SINGLE} nor {INDEX} is there; the directory holds no weights"


def indexed_tensors(path: Path, index: str, read: Callable[[Path], Mapping[str, Tensor]]) -> list[Tensor]:
    """The tensors in all files that file ``index`` in directory ``path`` names; ``read`` returns those of one file.

    Raises:
        McaError: A file is missing or damaged, or has other tensors than the index says.
    """
    weight_map, paths = indexed_files(path, index)
    files = sorted(paths)
    tensors: dict[str, Tensor] = {}
    faults: list[str] = []
    for file in files:
        try:
            found = read(paths[file])
        except McaError as error:
            faults.append(str(error))
            continue
        twice = tensors.keys() & found.keys()
        faults += (f"{path}: tensor {name} is in {tensors[name].file.name} and in {file}" for name in twice)
        tensors |= found
    raise_problems(faults, path, shown=_SHOWN)
    require_same_names(tensors.keys(), weight_map.keys(), path / index, "the files and their index")
    for name, file in weight_map.items():
        if tensors[name].file.name != PurePosixPath(file).name:
            raise McaError(
                f"{path / index}: says that {name} is in {file}, it is in {tensors[name].file.name}"
                "; fetch the checkpoint again"
            )
    return list(tensors.values())


def indexed_files(path: Path, index: str = INDEX) -> tuple[dict[str, str], dict[str, Path]]:
    """Return the file name of each tensor in file ``index`` of directory ``path``, and the path of each file.

    Raises:
        McaError: The index is damaged, or a file is missing.
    """
    weight_map = read_json(resolve_inside(path, index)).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise McaError(f"{path / index}: has no 'weight_map' from tensor to file names; fetch the file again")
    files = sorted(set(weight_map.values()))
    try:
        paths = {name: resolve_inside(path, name) for name in files}
    except McaError as error:
        raise with_location(error, path / index) from None
    absent = [name for name in files if not paths[name].exists()]
    if absent:
        raise McaError(
            f"{path}: {len(absent)} of {counted(len(files), 'file')} named in {index} are missing "
            f"({first_few(absent)}); download them again"
        )
    return weight_map, paths


class ConfigOnlySource(HfSourceBase):
    """Parameters of a Hugging Face checkpoint by name, type and shape alone: a ``ModelSource`` to plan with.

    Nothing can be read from it.

    Args:
        path: Of the directory.
        config: Of the model; None: from its ``config.json``.
        dtype: Safetensors code that quantised weights are read as; None: what ``config.json`` says.
    """

    def __init__(self, path: Path, config: McaModelConfig | None = None, dtype: str | None = None) -> None:
        self.path = path
        self._quantised: JsonObject | None = None
        if config is None:
            document = read_config(path)
            if read_quantization_config(document) is not None:
                self._quantised = document
                self._read_as = dtype or config_dtype(document)
            with named_config_errors(path):
                config = config_from_hf(dequantized_config(document, dtype))
        self._dtype = CODES[config.dtype] if self._quantised is None else config_dtype(self._quantised)
        self.config = config
        self.params: Sequence[Param] = stored_params(get_family(config.model_type).params(config))
        self._infos: dict[str, StoredTensor] = {}
        self._wholes = {param.mca_name(): full_shape(param, self.config) for param in self.params}
        self._parts = {param.mca_name(): self._param_parts(param) for param in self.params}

    def _param_parts(self, param: Param) -> tuple[Part, ...]:
        whole, experts = self.full_shape(param), self.config.num_experts
        dtype = "F32" if param.keep_fp32 else self._dtype
        front = (experts,) if param.stacked else ()
        infos = []
        for name, shape in zip(param.hf_names(), param_part_shapes(param, whole, HF), strict=True):
            if name not in self._infos:
                full = (*front, *shape)
                nbytes = prod(full) * ITEM_SIZES[dtype]
                info = TensorInfo(name, dtype, full, 0, nbytes, self.path / SINGLE)
                self._infos[name] = self._as_stored(info) if is_linear(param, whole) else info
            infos.append(self._infos[name])
        return checked_parts(param, whole, HF, infos, experts)

    def _as_stored(self, linear: TensorInfo) -> StoredTensor:
        if self._quantised is None:
            return linear
        from mca_models.quantization.hf_tensors import config_only_linear

        with named_config_errors(self.path):
            return config_only_linear(linear, self._quantised, self._read_as)
