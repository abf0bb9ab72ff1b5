"""The ``quantization_config`` of a ``config.json``, and the file without it.

`hf_tensors` knows the methods that are supported.
"""

from mca_config.types import JsonObject, Typed, Values
from mca_models.templates.composite_config import QUANTIZATION, without_quantization
from mca_models.templates.config_table import with_dtype


def read_quantization_config(hf_config: Values) -> Typed:
    """Return ``quantization_config``, from the top level or the text part; None for plain weights."""
    text = hf_config.get("text_config")
    inside = text.get(QUANTIZATION) if isinstance(text, dict) else None
    return hf_config.get(QUANTIZATION) or inside or None


def config_without_quantization(hf_config: Values, dtype: str) -> JsonObject:
    """``config.json`` of the dequantised model; ``dtype`` is a name such as ``bfloat16``."""
    return with_dtype(without_quantization(hf_config), dtype)
