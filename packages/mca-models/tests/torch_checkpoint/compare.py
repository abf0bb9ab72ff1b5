"""Compares an opened checkpoint with the HF tensors that it was made from."""

from typing import Any

import torch


def assert_same(source: Any, hf: dict[str, torch.Tensor]) -> None:
    """Every HF tensor comes out of ``source`` as it is in ``hf``, but for router biases, kept in fp32."""
    seen = set()
    for param in source.params:
        for name, array in zip(param.hf_names(), source.read(param, None), strict=True):
            expected = hf[name][param.expert] if param.stacked else hf[name]
            if param.keep_fp32 and array.dtype == "float32":
                expected = expected.float()
            assert array.tobytes() == expected.flatten().view(torch.uint8).numpy().tobytes(), name
            seen.add(name)
    assert seen == set(hf)
