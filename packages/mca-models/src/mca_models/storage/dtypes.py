"""Element types by their safetensors code (``BF16``, ``F32``, ...).

Torch's dtypes are not known here.
"""

from mca_config.errors import McaError
from mca_models.weights.arrays import NumpyDtype

ITEM_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip

_NUMPY = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "F32": "float32", "F64": "float64",
}  # fmt: skip

_ML_DTYPES = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}

CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Codes by the dtype names of ``config.json`` and of ``McaModelConfig.dtype``."""

DTYPE_NAMES = {code: name for name, code in CODES.items()}
"""The inverse of ``CODES``."""


def numpy_dtype(code: str) -> NumpyDtype:
    """The NumPy type of a safetensors code; bfloat16 and the 8-bit floats come from ``ml_dtypes``."""
    import numpy as np

    if code in _NUMPY:
        return np.dtype(_NUMPY[code])
    if code not in _ML_DTYPES:
        raise McaError(f"no array type for safetensors dtype {code!r}")
    import ml_dtypes

    dtype: NumpyDtype = np.dtype(getattr(ml_dtypes, _ML_DTYPES[code]))
    return dtype


def dtype_code(dtype: object) -> str:
    """The safetensors code of a NumPy (or ``ml_dtypes``) type."""
    import numpy as np

    name = np.dtype(dtype).name  # type: ignore[call-overload]
    for table in (_NUMPY, _ML_DTYPES):
        for code, numpy_name in table.items():
            if numpy_name == name:
                return code
    raise McaError(f"safetensors has no dtype for arrays of {name}")
