"""Quantised Hugging Face checkpoints: their ``quantization_config``, and which tensors belong together.

`fp8` and `mxfp4` dequantise; `fp8` quantises too.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from math import prod

from mca_config.errors import HfConfigError, McaError
from mca_config.types import JsonObject, Typed, Values
from mca_models.quantization.fp8 import FP8, SCALE_SUFFIX, Fp8Tensor, fp8_tensor
from mca_models.quantization.mxfp4 import BLOCKS, GROUP, SCALES, Mxfp4Tensor, mxfp4_tensor
from mca_models.storage.byte_ranges import Shape
from mca_models.storage.dtypes import ITEM_SIZES
from mca_models.storage.safetensors import TensorInfo
from mca_models.templates.config_table import QUANTIZATION, with_dtype, without_quantization
from mca_models.weights import Param, Stage

HfTensor = TensorInfo | Fp8Tensor | Mxfp4Tensor
_NEVER_QUANTISED = (
    "router.weight",
    "shared_experts.gate_weight",
    "eh_proj.weight",
    "position_embeddings.weight",
    "self_attention.A_log",
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


def dequantize(infos: Mapping[str, TensorInfo], hf_config: Values, dtype: str) -> dict[str, HfTensor]:
    """The tensors of a checkpoint by the names that they have unquantised.

    Args:
        infos: All that is stored, scales included.
        hf_config: The parsed ``config.json``.
        dtype: Safetensors code that quantised tensors are read as; the others keep theirs.

    Raises:
        McaError: A method that cannot be read, or tensors and scales that do not fit together.
    """
    quantisation = read_quantization_config(hf_config)
    if quantisation is None:
        return dict(infos)
    method = _method(quantisation)
    return _fp8(infos, _block_size(quantisation), dtype) if method == "fp8" else _mxfp4(infos, dtype)


def _method(quantisation: Typed) -> str:
    if not isinstance(quantisation, dict):
        raise HfConfigError(f"config.json: '{QUANTIZATION}' must be an object, not {quantisation!r:.80}")
    method = quantisation.get("quant_method")
    if method not in ("fp8", "mxfp4"):
        raise HfConfigError(
            f"config.json: quant_method {method!r} cannot be read; supported: 'fp8', 'mxfp4'. Dequantise the model "
            "with transformers first, or take its unquantised checkpoint"
        )
    return str(method)


def config_only_linear(linear: TensorInfo, hf_config: Values, dtype: str) -> HfTensor:
    """Return the tensor of a quantised checkpoint for ``linear``, the weight of a linear or of all experts.

    Args:
        linear: The unquantised tensor.
        hf_config: The parsed ``config.json``.
        dtype: Safetensors code that quantised tensors are read as.

    Raises:
        McaError: A method that cannot be read.
    """
    quantisation, shape = read_quantization_config(hf_config), linear.shape
    method = _method(quantisation)
    if _is_left_out(linear.name, quantisation.get("modules_to_not_convert") or ()):
        return linear
    if method == "fp8":
        block = _block_size(quantisation)
        grid = (
            *shape[:-2],
            *(-(-size // part) for size, part in zip(shape[-2:], block or shape, strict=False)),
        )
        scale = _stored_as(linear, SCALE_SUFFIX, "F32", grid if block else (1,))
        return fp8_tensor(_stored_as(linear, "", FP8[0], shape), scale, block, dtype)
    if len(shape) != 3 or shape[1] % GROUP:
        return linear
    groups = shape[0], shape[2], shape[1] // GROUP
    blocks = _stored_as(linear, BLOCKS, "U8", (*groups, GROUP // 2))
    return mxfp4_tensor(blocks, _stored_as(linear, SCALES, "U8", groups), dtype)


def _is_left_out(tensor: str, modules: Iterable[str]) -> bool:
    """Return whether one of ``modules`` (``*`` matches a number) is or contains the module of ``tensor``."""
    patterns = (re.escape(module).replace(r"\*", r"[^.]+") for module in modules)
    return any(re.search(rf"(^|\.){pattern}(\.|$)", tensor) for pattern in patterns)


def _stored_as(info: TensorInfo, suffix: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(info.name + suffix, dtype, shape, 0, prod(shape) * ITEM_SIZES[dtype], info.file)


def _block_size(quantisation: Values) -> tuple[int, int] | None:
    block = quantisation.get("weight_block_size")
    if block is None:
        return None
    if (
        not isinstance(block, list | tuple)
        or len(block) != 2
        or not all(type(n) is int and n > 0 for n in block)
    ):
        raise HfConfigError(f"config.json: weight_block_size must be two sizes, not {block!r}")
    return block[0], block[1]


def _fp8(infos: Mapping[str, TensorInfo], block: tuple[int, int] | None, dtype: str) -> dict[str, HfTensor]:
    found: dict[str, HfTensor] = {}
    scales = {name for name in infos if name.endswith(SCALE_SUFFIX)}
    _require_partners(scales, infos, SCALE_SUFFIX, "")
    for name, info in infos.items():
        if name in scales or _scales_activations(name, scales):
            continue
        if name + SCALE_SUFFIX in scales:
            found[name] = fp8_tensor(info, infos[name + SCALE_SUFFIX], block, dtype)
        elif info.dtype in FP8:
            raise McaError(
                f"{info.file}: {name} is fp8 but has no scale {name + SCALE_SUFFIX}"
                "; fetch the checkpoint again"
            )
        else:
            found[name] = info
    return found


def _scales_activations(name: str, scales: Collection[str]) -> bool:
    """Return whether ``name`` is the scale of an fp8 linear's inputs, which its weight does not depend on."""
    module = name.removesuffix("activation_scale")
    return module != name and (
        f"{module}weight{SCALE_SUFFIX}" in scales or module.removesuffix("_") + SCALE_SUFFIX in scales
    )


def _mxfp4(infos: Mapping[str, TensorInfo], dtype: str) -> dict[str, HfTensor]:
    blocks = {name for name in infos if name.endswith(BLOCKS)}
    scales = {name for name in infos if name.endswith(SCALES)}
    _require_partners(blocks, infos, BLOCKS, SCALES)
    _require_partners(scales, infos, SCALES, BLOCKS)
    found: dict[str, HfTensor] = {}
    for name, info in infos.items():
        if name in blocks:
            plain = name.removesuffix(BLOCKS)
            found[plain] = mxfp4_tensor(info, infos[plain + SCALES], dtype)
        elif name not in scales:
            found[name] = info
    return found


def _require_partners(names: set[str], infos: Mapping[str, TensorInfo], suffix: str, other: str) -> None:
    alone = sorted(name for name in names if name.removesuffix(suffix) + other not in infos)
    if alone:
        missing = alone[0].removesuffix(suffix) + other
        raise McaError(
            f"{infos[alone[0]].file}: {len(alone)} quantised tensors are incomplete ({alone[0]} without {missing})"
            "; fetch the checkpoint again"
        )
