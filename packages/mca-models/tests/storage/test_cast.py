"""Rounding of fp64 numbers to bf16 through fp32."""

import numpy as np
import torch

from mca_models.storage.dtypes import numpy_dtype
from mca_models.storage.values import cast_into, round_to_odd


def test_numbers_that_are_not_exact_become_odd_and_nan_stays_as_it_is() -> None:
    exact = np.array([0.0, 1.0, -2.5, np.nan, np.inf])
    np.testing.assert_array_equal(
        round_to_odd(exact).view(np.uint32), exact.astype(np.float32).view(np.uint32)
    )
    between = np.array([1 + 2.0**-30, -1 - 2.0**-30, 1 + 2.0**-23 + 2.0**-30, 2 - 2.0**-30])
    found = round_to_odd(between)
    assert (found.view(np.uint32) % 2 == 1).all()
    neighbours = [
        np.nextafter(np.float32(number), np.float32(side)) for number in between for side in (-9, 9)
    ]
    assert {*found.tolist()} <= {*map(float, neighbours), *between.astype(np.float32).tolist()}


def test_fp64_is_rounded_once_to_bf16() -> None:
    """Numbers close to the middle of two bf16 numbers, which fp32 rounds to the middle."""
    middle = 1 + 2.0**-8
    numbers = np.array([middle - 2.0**-40, middle + 2.0**-40, -middle - 2.0**-40, np.nan])
    target = np.empty(4, numpy_dtype("BF16"))
    cast_into(numbers, target, "w")
    rounded = torch.from_numpy(target.view(np.int16)).view(torch.bfloat16).float()
    assert rounded[:3].tolist() == [1.0, 1 + 2.0**-7, -1 - 2.0**-7] and bool(rounded[3].isnan())
