"""fp8 and mxfp4 weights read as torch and transformers compute them, bit for bit and in slices."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from mca_config.errors import McaError
from mca_models.quantization.hf_tensors import (
    config_only_linear,
    config_without_quantization,
    dequantize,
    read_quantization_config,
)
from mca_models.storage.safetensors import TensorInfo, read_header

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}


def stored(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, TensorInfo]:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    return read_header(tmp_path / "model.safetensors").tensors


def bits(array: Any) -> bytes:
    if isinstance(array, torch.Tensor):
        array = array.contiguous().view(torch.uint8).numpy()
    return bytes(np.ascontiguousarray(array).tobytes())


def fp8(shape: tuple[int, ...], block: int = 128, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random fp8 weights with all kinds of values, and their scales."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    weight[weight % 128 == 127] = 5  # no NaN
    grid = (*shape[:-2], -(-shape[-2] // block), -(-shape[-1] // block))
    return weight.view(torch.float8_e4m3fn), torch.rand(grid, generator=generator) * 1e-3 + 1e-6


def straightforward(
    weight: torch.Tensor, scale: torch.Tensor, block: int, dtype: torch.dtype
) -> torch.Tensor:
    rows, columns = weight.shape[-2:]
    spread = scale.float().repeat_interleave(block, -2).repeat_interleave(block, -1)
    return (weight.float() * spread[..., :rows, :columns]).to(dtype)


def test_scales_of_activations_are_passed_over(tmp_path: Path) -> None:
    weights = {"w.weight": fp8((4, 4))[0], "e.up_proj": fp8((2, 4, 4))[0]}
    scales = ("w.weight_scale_inv", "w.activation_scale", "e.up_proj_scale_inv", "e.up_proj_activation_scale")
    infos = stored(
        tmp_path, {**weights, **{name: torch.ones(()) for name in (*scales, "x.activation_scale")}}
    )
    static = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
    assert dequantize(infos, static, "BF16").keys() == {*weights, "x.activation_scale"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(256, 128), (300, 200), (1, 1), (127, 129), (5, 1000), (3, 130, 257), (2, 2, 40, 129)], ids=str
)
def test_fp8_equals_the_fp32_product_then_cast(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    weight, scale = fp8(shape)
    infos = stored(tmp_path, {"w.weight": weight, "w.weight_scale_inv": scale, "n.weight": torch.ones(3)})
    found = dequantize(infos, FP8, dtype)
    assert found.keys() == {"w.weight", "n.weight"}
    tensor: Any = found["w.weight"]
    expected = straightforward(weight, scale, 128, DTYPES[dtype])
    assert (tensor.shape, tensor.dtype, tensor.nbytes) == (shape, dtype, expected.nbytes)
    assert bits(tensor.read()) == bits(expected)
    assert bits(tensor.read(1, 2)) == bits(expected[1:2])
    flat = expected.reshape(-1)
    for start, stop in ((0, 1), (flat.numel() // 3, flat.numel() // 2 + 1), (0, flat.numel())):
        assert bits(tensor.flat()[start:stop]) == bits(flat[start:stop])


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 50),
    columns=st.integers(1, 50),
    block=st.integers(1, 20),
    cut=st.integers(0, 2500),
    more=st.integers(0, 300),
)
def test_any_block_size_and_slice(
    tmp_path_factory: Any, rows: int, columns: int, block: int, cut: int, more: int
) -> None:
    weight, scale = fp8((rows, columns), block)
    infos = stored(tmp_path_factory.mktemp("q"), {"w": weight, "w_scale_inv": scale})
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [block, block]}}
    tensor: Any = dequantize(infos, config, "BF16")["w"]
    expected = straightforward(weight, scale, block, torch.bfloat16).reshape(-1)
    assert bits(tensor.flat()[cut : cut + more]) == bits(expected[cut : cut + more])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8]
)
def test_scales_of_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    weight, _ = fp8((140, 260))
    exponents = torch.randint(-8, 3, (2, 3))
    scale = (exponents + 127).to(torch.uint8) if dtype == torch.uint8 else (2.0**exponents).to(dtype)
    tensor: Any = dequantize(stored(tmp_path, {"w": weight, "w_scale_inv": scale}), FP8, "BF16")["w"]
    assert bits(tensor.read()) == bits(straightforward(weight, 2.0**exponents, 128, torch.bfloat16))


@pytest.mark.parametrize("exponent", [254, 255])
def test_scales_that_are_too_large_make_no_warning(exponent: int, tmp_path: Path) -> None:
    weight = torch.tensor([[448.0, 0.0]] * 2).to(torch.float8_e4m3fn)
    scale = torch.full((1, 1), exponent, dtype=torch.uint8)
    tensor: Any = dequantize(stored(tmp_path, {"w": weight, "w_scale_inv": scale}), FP8, "F32")["w"]
    assert np.isinf(tensor.read()[:, 0]).all()


@pytest.mark.parametrize("config", [FP8, {"quantization_config": {"quant_method": "fp8"}}])
def test_one_scale_for_a_whole_tensor(tmp_path: Path, config: Any) -> None:
    weight, _ = fp8((140, 260))
    tensor: Any = dequantize(
        stored(tmp_path, {"w": weight, "w_scale_inv": torch.tensor(0.37)}), config, "F32"
    )["w"]
    assert bits(tensor.read()) == bits(weight.float() * 0.37)


def test_memory_is_that_of_the_slice(tmp_path: Path) -> None:
    weight, scale = fp8((4096, 2048))
    tensor: Any = dequantize(stored(tmp_path, {"w": weight, "w_scale_inv": scale}), FP8, "BF16")["w"]
    tensor.flat()[0:1000]
    tracemalloc.start()
    for start in range(0, 4096 * 2048, 1 << 19):
        tensor.flat()[start : start + (1 << 19)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20


def test_fp16_overflow_names_the_tensor(tmp_path: Path) -> None:
    weight = torch.full((4, 4), 448.0).to(torch.float8_e4m3fn)
    tensor: Any = dequantize(
        stored(tmp_path, {"w": weight, "w_scale_inv": torch.full((1, 1), 200.0)}), FP8, "F16"
    )["w"]
    with pytest.raises(McaError, match=r"^tensor w: 89600 overflows fp16"):
        tensor.read()


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"w": torch.ones(4, 4).to(torch.float8_e4m3fn)}, FP8, "w is fp8 but has no scale w_scale_inv"),
        ({"w_scale_inv": torch.ones(1, 1)}, FP8, "w_scale_inv without w"),
        ({"w": torch.ones(4, 4), "w_scale_inv": torch.ones(1, 1)}, FP8, "which is F32"),
        (
            {"w": torch.ones(200, 4).to(torch.float8_e4m3fn), "w_scale_inv": torch.ones(1, 2)},
            FP8,
            r"has shape \[1, 2\]; blocks of 128 x 128 of w \[200, 4\] need \[2, 1\]",
        ),
        (
            {"w": torch.ones(200, 4).to(torch.float8_e4m3fn), "w_scale_inv": torch.ones(2, 1)},
            {"quantization_config": {"quant_method": "fp8"}},
            "no weight_block_size",
        ),
        ({}, {"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq' cannot be read"),
        (
            {},
            {"text_config": {"quantization_config": {"quant_method": "awq"}}},
            "quant_method 'awq' cannot be",
        ),
        ({}, {"quantization_config": {"quant_method": "fp8", "weight_block_size": 128}}, "must be two sizes"),
        ({"x_blocks": torch.ones(1, 2, 3, 16, dtype=torch.uint8)}, MXFP4, "x_blocks without x_scales"),
        (
            {
                "x_blocks": torch.ones(1, 2, 3, 16, dtype=torch.uint8),
                "x_scales": torch.ones(1, 2, 4, dtype=torch.uint8),
            },
            MXFP4,
            r"x_scales is U8 \[1, 2, 4\]; x_blocks needs U8 \[1, 2, 3\]",
        ),
        (
            {
                "x_blocks": torch.ones(1, 2, 3, 8, dtype=torch.uint8),
                "x_scales": torch.ones(1, 2, 3, dtype=torch.uint8),
            },
            MXFP4,
            "expected U8 of",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], config: Any, message: str
) -> None:
    with pytest.raises(McaError, match=message):
        dequantize(stored(tmp_path, {**tensors, "other": torch.ones(1)}), config, "BF16")


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("scales", [(96, 140), (0, 256)], ids=["common", "all"])
def test_mxfp4_equals_transformers(tmp_path: Path, dtype: str, scales: tuple[int, int]) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 70, 5, 16), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(*scales, (3, 70, 5), generator=generator).to(torch.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    infos = stored(tmp_path, {f"{name}_blocks": blocks, f"{name}_scales": exponents, "b": torch.ones(2)})
    found = dequantize(infos, MXFP4, dtype)
    assert found.keys() == {name, "b"}
    tensor: Any = found[name]
    expected = convert_moe_packed_tensors(blocks, exponents, dtype=DTYPES[dtype])
    assert tensor.shape == tuple(expected.shape) == (3, 160, 70)
    with np.errstate(invalid="ignore", over="ignore"):
        assert_same_numbers(tensor.read(), expected)
        assert_same_numbers(tensor.read(1, 3), expected[1:])
        flat = expected.reshape(-1)
        for start, stop in ((0, 7), (40 * 70, 50 * 70), (160 * 70 - 100, 160 * 70 + 333), (5000, 20000)):
            assert_same_numbers(tensor.flat()[start:stop], flat[start:stop])


def test_mxfp4_that_overflows_fp16_names_the_tensor(tmp_path: Path) -> None:
    blocks = torch.full((1, 2, 1, 16), 0x77, dtype=torch.uint8)
    for exponent, fits in ((13, True), (14, False)):
        scales = torch.full((1, 2, 1), 127 + exponent, dtype=torch.uint8)
        tensor: Any = dequantize(stored(tmp_path, {"x_blocks": blocks, "x_scales": scales}), MXFP4, "F16")[
            "x"
        ]
        if fits:
            assert (tensor.read() == 6 * 2**exponent).all()
        else:
            with pytest.raises(McaError, match=r"^tensor x: a value overflows fp16"):
                tensor.read()


def assert_same_numbers(found: Any, expected: torch.Tensor) -> None:
    """Equal bits, but for the sign and payload of NaN."""
    left, right = found.astype(np.float32), expected.float().numpy()
    assert np.array_equal(np.isnan(left), np.isnan(right))
    kept = ~np.isnan(left)
    assert bits(left[kept]) == bits(right[kept])


def test_an_unquantised_checkpoint_passes_through(tmp_path: Path) -> None:
    infos = stored(tmp_path, {"w": torch.ones(2)})
    assert dequantize(infos, {"model_type": "llama"}, "BF16") == infos


def test_the_plain_config_forgets_the_quantisation() -> None:
    config = {"model_type": "deepseek_v3", "torch_dtype": "bfloat16", **FP8}
    assert config_without_quantization(config, "float32") == {
        "model_type": "deepseek_v3",
        "torch_dtype": "float32",
    }


@pytest.mark.parametrize("top", [{}, FP8], ids=["in the text part alone", "at the top too"])
def test_the_text_part_may_say_it(top: dict[str, Any], tmp_path: Path) -> None:
    config = {"model_type": "internvl", **top, "text_config": {"model_type": "qwen2", **FP8}}
    assert read_quantization_config(config) == FP8["quantization_config"]
    tensors = {"w": torch.ones(4, 4).to(torch.float8_e4m3fn), "w_scale_inv": torch.ones(1, 1)}
    assert list(dequantize(stored(tmp_path, tensors), config, "BF16")) == ["w"]
    plain = {"model_type": "internvl", "text_config": {"model_type": "qwen2"}, "dtype": "bfloat16"}
    assert config_without_quantization(config, "bfloat16") == plain


def test_a_configuration_without_blocks_has_one_scale_for_each_linear() -> None:
    linear = TensorInfo("w.weight", "BF16", (4, 6), 0, 48, Path("model.safetensors"))
    found = config_only_linear(linear, {"quantization_config": {"quant_method": "fp8"}}, "BF16")
    assert (found.name, found.shape, found.dtype, found.nbytes) == ("w.weight", (4, 6), "BF16", 48)
