"""fp8 weights with scales of blocks of 128 x 128, or one a tensor: dequantised from a stream, quantised on the device.

The numbers are those of `mca_models.quantization.fp8`, which defines blocks and scales. A weight may come before
its scales, and both in pieces; pieces are stored until the scales are complete.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mca_models.megatron.state.weight_receiver import Weight, dtype_fault
from mca_models.quantization.fp8 import BLOCK, LARGEST, SCALE_SUFFIX, SMALLEST_SCALE, not_finite, scale_shape
from mca_models.storage.byte_ranges import Shape

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class _Quantised:
    """Received parts of a weight with scales.

    Args:
        shape: Shape of the weight.
        scales: fp32 scales of all its blocks.
        rows: Mask of the rows of scales that were received.
        pieces: Pieces that wait for scales.
        values: Whether some of the weight was received in fp8.
    """

    shape: Shape
    scales: Tensor
    rows: Tensor
    pieces: list[Weight] = field(default_factory=list)
    values: bool = False

    @property
    def known(self) -> bool:
        """Return whether all scales were received."""
        return bool(self.rows.all())


class DequantizedWeights:
    """Stream of weights without quantisation.

    Args:
        expected_shape: Returns the shape of a tensor by name; None: it is not expected.
        report: Called with the name of a tensor and its problem.
        uses: Returns whether this rank needs a tensor; others keep their shape only.
    """

    def __init__(
        self,
        expected_shape: Callable[[str], Shape | None],
        report: Callable[[str, str], None],
        uses: Callable[[str], bool],
    ) -> None:
        self._expected_shape, self._report, self._uses = expected_shape, report, uses
        self._found: dict[str, _Quantised] = {}

    def dequantize(self, weights: Iterable[Weight]) -> Iterator[Weight]:
        """Yield ``weights``, those in fp8 as fp32 once their scales are complete."""
        for weight in weights:
            name, tensor = weight[:2]
            base = name.removesuffix(SCALE_SUFFIX)
            shape = self._expected_shape(base)
            if shape is None or (base == name and tensor.dtype not in _FP8):
                yield weight
            elif len(shape) < 2:
                self._report(base, f"{name} has shape {list(tensor.shape)}; expected a plain {list(shape)}")
            else:
                entry = self._found.setdefault(base, _new(shape, tensor.device))
                yield from self._scales(base, entry, weight) if base != name else self._values(entry, weight)
        self._finish()

    def _values(self, entry: _Quantised, weight: Weight) -> Iterator[Weight]:
        entry.values = True
        if entry.known:
            yield self._plain(entry, weight)
        else:
            entry.pieces.append(_with(weight, weight[1].clone()) if self._uses(weight[0]) else weight)

    def _scales(self, base: str, entry: _Quantised, weight: Weight) -> Iterator[Weight]:
        name, scales, *start = weight
        if fault := _fault(entry, scales, start[0] if start else None) or _scale_fault(scales):
            self._report(base, f"{name} {fault}")
            return
        first = start[0] if start else 0
        stop = first + len(scales) if start else len(entry.rows)
        entry.scales[first:stop] = scales  # broadcasts a single scale
        entry.rows[first:stop] = True
        if entry.known:
            waiting, entry.pieces = entry.pieces, []
            yield from (self._plain(entry, piece) for piece in waiting)

    def _plain(self, entry: _Quantised, weight: Weight) -> Weight:
        name, tensor, *start = weight
        first = start[0] if start else 0
        stop = first + tensor.shape[0] if tensor.dim() else 0
        if not self._uses(name) or tensor.shape[1:] != entry.shape[1:] or stop > entry.shape[0]:
            return weight
        plain, scales = tensor.float(), entry.scales.to(tensor.device)
        if plain.dim() == 2:
            _multiply(plain, scales, first)
        else:
            for matrix, grid in zip(plain.flatten(0, -3), scales[first:stop].flatten(0, -3), strict=True):
                _multiply(matrix, grid, 0)
        return _with(weight, plain)

    def _finish(self) -> None:
        for name, entry in self._found.items():
            if not entry.known:
                what = "is fp8, and" if entry.values else "came with scales, and"
                self._report(name, f"{name} {what} {name}{SCALE_SUFFIX} is missing or incomplete")
            elif not entry.values:
                self._report(name, f"{name}{SCALE_SUFFIX} came, but no {name} in fp8")


def _with(weight: Weight, tensor: Tensor) -> Weight:
    """Return ``weight`` with its tensor replaced by ``tensor``."""
    return (weight[0], tensor) if len(weight) == 2 else (weight[0], tensor, weight[2])


def _new(shape: Shape, device: torch.device) -> _Quantised:
    grid = scale_shape(shape)
    return _Quantised(shape, torch.zeros(grid, device=device), torch.zeros(grid[0], dtype=torch.bool))


def _fault(entry: _Quantised, scales: Tensor, start: int | None) -> str | None:
    grid, given, first = tuple(entry.scales.shape), tuple(scales.shape), start or 0
    fits = given[1:] == grid[1:] and 0 <= first <= grid[0] - given[0] if given else False
    if start is None:
        fits = given == grid or scales.numel() == 1
    if not fits:
        rows = "" if start is None else f" from row {start} on"
        return f"has shape {list(given)}{rows}, expected {list(grid)}"
    return "came twice" if entry.rows[first : None if start is None else first + len(scales)].any() else None


def _scale_fault(scales: Tensor) -> str | None:
    return None if scales.is_floating_point() else dtype_fault(scales)


def _multiply(matrix: Tensor, scales: Tensor, first: int) -> None:
    """Scale rows of a weight from row ``first`` on, in place."""
    by_column = scales.repeat_interleave(BLOCK, 1)[:, : matrix.shape[1]]
    start = 0
    while start < len(matrix):
        band = (first + start) // BLOCK
        stop = min((band + 1) * BLOCK - first, len(matrix))
        matrix[start:stop] *= by_column[band]
        start = stop


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
