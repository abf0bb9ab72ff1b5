"""Quantise weights to fp8 blocks with scales on the device: the numbers of `mca_models.quantization.fp8_write`.

That module defines blocks and scales.
"""

import torch
from torch import Tensor

from mca_models.quantization.fp8_tile import BLOCK, LARGEST, SMALLEST_SCALE
from mca_models.quantization.fp8_write import not_finite

_STEP = 1 << 22
"""Elements that are converted to fp32 at a time."""


def quantised(name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 values like ``weight`` ``[..., rows, columns]``, and fp32 scales of its blocks.

    Raises:
        McaError: Tensor ``name`` has a value that is not finite.
    """
    rows, columns = weight.shape[-2:]
    grid = -(-rows // BLOCK), -(-columns // BLOCK)
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(*weight.shape[:-2], *grid, dtype=torch.float32, device=weight.device)
    bands = max(_STEP // (BLOCK * columns), 1)
    for matrix, out, scale in zip(
        weight.reshape(-1, rows, columns), values.view(-1, rows, columns), scales.view(-1, *grid), strict=True
    ):
        for band in range(0, grid[0], bands):
            cut = slice(band * BLOCK, (band + bands) * BLOCK)
            _quantise(matrix[cut], out[cut], scale[band : band + bands])
    if not torch.isfinite(scales).all():
        raise not_finite(name)
    return values, scales


def _quantise(weight: Tensor, values: Tensor, scales: Tensor) -> None:
    """Quantise rows of one matrix, from the first row of a block."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(len(scales), BLOCK, -1, BLOCK)
    largest = blocks.abs().amax((1, 3))
    # divide by a tensor: for a number devices multiply by its inverse
    torch.div(largest, torch.full_like(largest, LARGEST), out=scales)
    scales.clamp_(min=SMALLEST_SCALE).masked_fill_(largest == 0, 1.0)
    blocks /= scales[:, None, :, None]
    values.copy_(padded[:rows, :columns])
