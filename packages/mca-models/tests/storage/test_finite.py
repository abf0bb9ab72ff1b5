"""Values that are infinite or NaN are found whatever their type, sign, payload and place."""

import numpy as np
import pytest

from mca_models.storage.dtypes import numpy_dtype
from mca_models.storage.values import INFINITY, all_finite, counts_in, named_counts, non_finite


@pytest.mark.parametrize("code", ["F16", "BF16", "F32", "F64"])
def test_exactly_the_infinite_and_nan_are_found(code: str) -> None:
    dtype = numpy_dtype(code)
    width, infinity = 8 * dtype.itemsize, INFINITY[dtype.name]
    for bits, finite in (
        (infinity - 1, True),
        (infinity, False),
        (infinity + 1, False),
        (1, True),
        (0, True),
    ):
        for sign in (0, 1 << width - 1):
            values = np.zeros(1001, dtype)
            values.view(f"u{dtype.itemsize}")[777] = bits | sign
            assert all_finite(values) == finite == bool(np.isfinite(values[777]))
            assert np.flatnonzero(non_finite(values)).tolist() == ([] if finite else [777])
    assert all_finite(np.empty(0, dtype)) and all_finite(np.full((3, 5), -3.5, dtype))


def test_the_first_tensors_are_named_with_their_numbers() -> None:
    bad = np.array([1, np.nan, -np.inf], np.float32)
    tensors = [(f"t{i}", bad[: i + 1]) for i in range(3)] + [("whole", np.arange(3))]
    assert (counts := counts_in(tensors)) == {"t1": 1, "t2": 2}
    reported = "2 tensors have values that are not finite (infinite or NaN): t1 (1 value)"
    assert named_counts(counts) == f"{reported}, t2 (2 values)"
    assert named_counts(counts, shown=1) == f"{reported} and 1 more"
