"""The quantised part of a Hugging Face model: its ``quantization_config``, and the weights that methods quantise.

`hf_tensors` knows the methods that are supported.
"""

from mca_config.types import JsonObject, Typed, Values
from mca_models.storage.byte_ranges import Shape
from mca_models.templates.composite_config import QUANTIZATION, without_quantization
from mca_models.templates.config_table import with_dtype
from mca_models.weights import Param, Stage

_NEVER_QUANTISED = (
    "router.weight",
    "shared_experts.gate_weight",
    "eh_proj.weight",
    "position_embeddings.weight",
    "indexer.weights_proj",  # transformers keeps it in fp32, engines leave it as it is
)
_NOT_INSIDE = (Stage.LAST, Stage.VISION, Stage.PASSTHROUGH)


def read_quantization_config(hf_config: Values) -> Typed:
    """Return ``quantization_config``, from the top level or the text part; None for plain weights."""
    text = hf_config.get("text_config")
    inside = text.get(QUANTIZATION) if isinstance(text, dict) else None
    return hf_config.get(QUANTIZATION) or inside or None


def config_without_quantization(hf_config: Values, dtype: str) -> JsonObject:
    """``config.json`` of the dequantised model; ``dtype`` is a name such as ``bfloat16``."""
    return with_dtype(without_quantization(hf_config), dtype)


def is_linear(param: Param, whole: Shape) -> bool:
    """Return whether quantisation methods take ``param``, of full shape ``whole``, for the weight of a linear."""
    left_out = param.vocab or param.stage in _NOT_INSIDE or param.mca.endswith(_NEVER_QUANTISED)
    return len(whole) == 2 and not left_out
