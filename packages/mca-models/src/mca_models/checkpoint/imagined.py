"""A checkpoint of which only the configuration is there: every tensor in name, type and shape alone."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path

from mca_config.model_config import McaModelConfig
from mca_models.checkpoint.dtypes import CODES, ITEM_SIZES
from mca_models.checkpoint.hf_directory import SINGLE, plain_dtype, read_config
from mca_models.checkpoint.moves import HF, Rule, Side, part_shapes
from mca_models.checkpoint.placement import stored
from mca_models.checkpoint.runs import Gather, Shape
from mca_models.checkpoint.safetensors import TensorInfo
from mca_models.checkpoint.source import Part, checked_parts, plan_gathers
from mca_models.templates import config_from_hf, family_of
from mca_models.templates.shapes import whole_shape
from mca_models.weights import Param


class ImaginedSource:
    """What a Hugging Face checkpoint of a model would hold. A ``ModelSource`` to plan with; nothing can be read.

    Args:
        path: Of the directory.
        config: Of the model; None: from its ``config.json``, quantised weights taken for what they stand for.
    """

    def __init__(self, path: Path, config: McaModelConfig | None = None) -> None:
        self.path = path
        if config is None:
            document = read_config(path)
            quantised = document.pop("quantization_config", None)
            config = config_from_hf(document)
            self._dtype = plain_dtype(document) if quantised else CODES.get(config.dtype, "BF16")
        else:
            self._dtype = CODES.get(config.dtype, "BF16")
        self.config = config
        self.params: Sequence[Param] = stored(family_of(config.model_type).params(config))
        self._infos: dict[str, TensorInfo] = {}
        self._parts = {param.mca_name(): self._imagine(param) for param in self.params}

    def _imagine(self, param: Param) -> tuple[Part, ...]:
        whole, experts = self.whole_shape(param), self.config.num_moe_experts or 0
        dtype = "F32" if param.keep_fp32 else self._dtype
        front = (experts,) if param.stacked else ()
        infos = []
        for name, shape in zip(param.hf_names(), part_shapes(Rule.of(param), whole, HF), strict=True):
            if name not in self._infos:
                full = (*front, *shape)
                nbytes = prod(full) * ITEM_SIZES[dtype]
                self._infos[name] = TensorInfo(name, dtype, full, 0, nbytes, self.path / SINGLE)
            infos.append(self._infos[name])
        return checked_parts(param, whole, HF, infos, experts)

    def side(self, param: Param) -> Side:
        """See ``ModelSource``."""
        return HF

    def parts(self, param: Param) -> tuple[Part, ...]:
        """See ``ModelSource``."""
        return self._parts[param.mca_name()]

    def gathers(self, param: Param, side: Side) -> tuple[Gather, ...]:
        """See ``ModelSource``."""
        return plan_gathers(param, self.whole_shape(param), HF, side)

    def whole_shape(self, param: Param) -> Shape:
        """See ``ModelSource``."""
        return whole_shape(param, self.config)

    def check_duplicates(self) -> None:
        """Nothing is stored twice."""

    def tensors(self) -> Iterable[TensorInfo]:
        """All that the checkpoint would hold."""
        return self._infos.values()

    def checksums(self) -> Mapping[Path, int]:
        """Nobody knows them."""
        return {}
