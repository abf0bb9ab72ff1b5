"""A checkpoint of which only the configuration is there: every tensor in name, type and shape alone.

It serves to plan a conversion before the weights are there. No element can be read from it.
"""

from collections.abc import Sequence
from math import prod
from pathlib import Path

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.checkpoint.hf_directory import (
    SINGLE,
    HfSourceBase,
    StoredTensor,
    config_dtype,
    dequantized_config,
    named_config_errors,
    read_config,
)
from mca_models.checkpoint.placement import stored_params
from mca_models.quantization.hf_tensors import is_linear, read_quantization_config
from mca_models.storage.copy_plan import HF
from mca_models.storage.dtypes import CODES, ITEM_SIZES
from mca_models.storage.safetensors import TensorInfo
from mca_models.storage.source import Part, checked_parts, param_part_shapes
from mca_models.templates import config_from_hf, get_family
from mca_models.templates.shapes import full_shape
from mca_models.weights import Param


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

    def check_duplicates(self) -> None:
        """Nothing is stored twice."""
