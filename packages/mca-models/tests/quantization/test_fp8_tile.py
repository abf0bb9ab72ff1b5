"""Blocks of weights in e4m3, against torch's cast of the quotients."""

from typing import Any

import numpy as np
import pytest
import torch

from mca_models.megatron.state import fp8
from mca_models.quantization.fp8 import BLOCK, LARGEST, WIDTH, Fp8Tile, quantize
from mca_models.storage.dtypes import numpy_dtype

_E4M3 = torch.float8_e4m3fn


def blocks(exponents: list[int], rows: int = 3, seed: int = 0) -> Any:
    """Return bf16 rows with a block of 128 columns for each exponent of its largest numbers, of both signs."""
    torch.manual_seed(seed)
    values = torch.randn(rows, len(exponents), BLOCK) * torch.exp2(
        -8 * torch.rand(rows, len(exponents), BLOCK)
    )
    values[0, :, :4] = 0.0
    scaled = values * torch.exp2(torch.tensor(exponents, dtype=torch.float32))[:, None]
    return scaled.flatten(1).bfloat16()


def numpy_bf16(weight: torch.Tensor) -> Any:
    return weight.contiguous().view(torch.int16).numpy().view(numpy_dtype("BF16"))


def expected(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return torch's e4m3 bytes and the scales, of blocks of all rows and 128 columns."""
    parts = weight.float().split(BLOCK, 1)
    scales = torch.stack([part.abs().max() / LARGEST for part in parts])
    scales = torch.where(scales == 0, 1.0, scales.clamp(min=2.0**-126))
    cast = [(part / scale).to(_E4M3).view(torch.uint8) for part, scale in zip(parts, scales, strict=True)]
    return torch.cat(cast, 1), scales


@pytest.mark.parametrize("exponents", [[0], [0, -7, 5], [-80, 9, 12, 0], [3] * 8])
@pytest.mark.parametrize("rows", [1, 3, 128])
@pytest.mark.parametrize("rest", [0, 1, 77])
def test_bf16_numbers_are_those_that_torch_casts(exponents: list[int], rows: int, rest: int) -> None:
    weight = torch.cat([blocks(exponents, rows), blocks([1], rows, 5)[:, :rest]], 1)[:, :WIDTH]
    values = np.zeros(weight.shape, np.uint8)
    scales = np.zeros(-(-weight.shape[1] // BLOCK), np.float32)
    Fp8Tile().quantise(numpy_bf16(weight), values, scales)
    right, right_scales = expected(weight)
    np.testing.assert_array_equal(scales, right_scales.numpy())
    np.testing.assert_array_equal(values, right.numpy())


@pytest.mark.parametrize("mantissa", range(0, 128, 3))
def test_every_mantissa_of_a_largest_number_is_scaled(mantissa: int) -> None:
    """All numbers of 8 binades below one whose last bits are ``mantissa``."""
    top = (127 << 7) + mantissa
    bits = torch.arange(top - 8 * 128 + 1, top + 1, dtype=torch.int16)
    weight = bits.view(torch.bfloat16).view(8, BLOCK).clone()
    weight[0, 0] = 0.0
    values, scales = np.zeros((8, BLOCK), np.uint8), np.zeros(1, np.float32)
    Fp8Tile().quantise(numpy_bf16(weight), values, scales)
    right, right_scales = expected(weight)
    np.testing.assert_array_equal(scales, right_scales.numpy())
    np.testing.assert_array_equal(values, right.numpy())


def test_blocks_of_zeros_have_the_scale_one() -> None:
    weight = torch.zeros(2, 2 * BLOCK, dtype=torch.bfloat16)
    weight[1, BLOCK] = -3.0
    values, scales = np.ones((2, 2 * BLOCK), np.uint8), np.zeros(2, np.float32)
    Fp8Tile().quantise(numpy_bf16(weight), values, scales)
    assert scales.tolist() == [1.0, np.float32(3) / np.float32(LARGEST)]
    assert values[1, BLOCK] == 0x80 + 0x7E and np.count_nonzero(values) == 1


@pytest.mark.parametrize("exponent", [1, 9, 10, 36, 140, 254])
def test_numbers_near_the_ends_of_fp32_are_divided_by_their_scale(exponent: int) -> None:
    """The exponent of bf16's bits of the largest number."""
    weight = torch.full((1, BLOCK), exponent << 7 | 1, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values, scales = np.zeros((1, BLOCK), np.uint8), np.zeros(1, np.float32)
    Fp8Tile().quantise(numpy_bf16(weight), values, scales)
    right, right_scales = expected(weight)
    np.testing.assert_array_equal(scales, right_scales.numpy())
    np.testing.assert_array_equal(values, right.numpy())


def test_scales_below_the_normal_numbers_are_the_smallest_of_these() -> None:
    """In the first block the largest number over 448 is 0 in fp32, in the second 3 x 2^-149 instead of 3.4."""
    weight = np.zeros((1, 3 * BLOCK), np.float32)
    weight[0, ::BLOCK] = 1e-43, 3.4 * 448 * 2.0**-149, -448 * 2.0**-126
    values, scales = np.ones(weight.shape, np.uint8), np.zeros(3, np.float32)
    Fp8Tile().quantise(weight, values, scales)
    on_device = fp8.quantised("name", torch.from_numpy(weight))
    for codes, found in ((values, scales), (on_device[0].view(torch.uint8).numpy(), on_device[1].numpy())):
        assert found.ravel().tolist() == [2.0**-126] * 3
        assert [int(codes[0, column]) & 0x7F for column in (0, BLOCK)] == [0, 0]  # below half of e4m3's step
        assert codes[0, 2 * BLOCK] == 0x80 + 0x7E


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_other_dtypes_are_divided(dtype: str) -> None:
    weight = blocks([2, -3]).float()
    values, scales = np.zeros(weight.shape, np.uint8), np.zeros(2, np.float32)
    array = weight.numpy().astype(numpy_dtype(dtype))
    Fp8Tile().quantise(array, values, scales)
    right, right_scales = expected(torch.from_numpy(array.astype(np.float32)))
    np.testing.assert_array_equal(values, right.numpy())
    np.testing.assert_array_equal(scales, right_scales.numpy())


def test_a_stack_of_matrices_is_quantized_one_by_one() -> None:
    weight = np.random.default_rng(0).normal(size=(3, BLOCK + 5, BLOCK + 7)).astype(np.float32)
    values, scales = quantize("name", weight)
    for number, matrix in enumerate(weight):
        alone = quantize("name", matrix)
        assert np.array_equal(values[number].view(np.uint8), alone[0].view(np.uint8))
        assert np.array_equal(scales[number], alone[1])
