"""The work of a conversion as data: each target tensor, the parts that fill it, and its split into chunks.

A chunk in mca_convert is a range of elements of one tensor that fits a buffer, not a pipeline chunk. `engine` executes
the fills.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import lcm, prod

from mca_config.errors import McaError
from mca_models.checkpoint.hf_writer import HfLayout
from mca_models.checkpoint.mca_directory import McaLayout
from mca_models.checkpoint.placement import shard_count, shard_files
from mca_models.quantization.fp8 import BLOCK, CODE, SCALE_CODE, Fp8Tensor, scale_shape
from mca_models.storage.byte_ranges import Gather, Move, clip
from mca_models.storage.copy_plan import HF
from mca_models.storage.dtypes import ITEM_SIZES
from mca_models.storage.safetensors import TensorInfo
from mca_models.storage.source import ModelSource, Part
from mca_models.weights import Param

FLOATS = frozenset({"F64", "F32", "BF16", "F16"})


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements ``start:stop`` of a target tensor; target positions of its moves are relative to ``start``."""

    start: int
    stop: int
    moves: tuple[Move, ...]
    zeros: tuple[tuple[int, int], ...]


def split(gather: Gather, elements: int) -> Iterator[Chunk]:
    """Split ``gather`` after ``elements`` or slightly fewer, so that strided moves are not split within a period."""
    step = elements
    period = lcm(*(move.target_stride for move in gather.moves if move.repeat > 1), 1)
    if period <= elements:
        step -= elements % period
    return split_exactly(gather, step)


def split_exactly(gather: Gather, elements: int) -> Iterator[Chunk]:
    """Split ``gather`` after every ``elements``."""
    for start in range(0, gather.size, elements):
        stop = min(start + elements, gather.size)
        moves = tuple(part for move in gather.moves for part in clip(move, start, stop))
        zeros = tuple(
            (max(a, start) - start, min(b, stop) - start) for a, b in gather.zeros if a < stop and b > start
        )
        yield Chunk(start, stop, moves, zeros)


@dataclass(frozen=True, slots=True)
class Fill:
    """One target tensor (or an expert's entry in a stacked one) and the source of its elements."""

    file: str
    tensor: str
    start: int
    """First element within the tensor."""
    gather: Gather
    parts: tuple[Part, ...]
    source_dtype: str
    dtype: str
    param: Param
    scales: str | None = None
    """Name of the tensor with the scales of fp8 blocks; None: the tensor is not written as fp8."""

    @property
    def nbytes(self) -> int:
        """Bytes that will be written."""
        return self.count_bytes(self.gather.size)

    def count_bytes(self, elements: int) -> int:
        """Return the bytes of ``elements`` elements and their scales; with fp8 blocks these are full rows of blocks."""
        nbytes = elements * ITEM_SIZES[self.dtype]
        if self.scales is not None:
            columns = self.gather.shape[-1]
            nbytes += prod(scale_shape((elements // columns, columns))) * ITEM_SIZES[SCALE_CODE]
        return nbytes


def source_dtypes(source: ModelSource) -> dict[str, str]:
    """Return the dtype code of each stored parameter's parts.

    Raises:
        McaError: The parts of a parameter have different dtypes, or one that weights cannot have.
    """
    for fault in dtype_faults(source):
        raise McaError(fault)
    return {param.mca_name(): source.parts(param)[0].info.dtype for param in source.params}


def dtype_faults(source: ModelSource) -> Iterator[str]:
    """Yield messages about parameters whose parts have different dtypes, or one that weights cannot have."""
    for param in source.params:
        parts = source.parts(param)
        found = sorted({part.info.dtype for part in parts})
        if strange := [part.info for part in parts if part.info.dtype not in FLOATS]:
            why = ""
            if strange[0].dtype.startswith("F8_"):
                why = "; fp8 needs its scales, and quantization_config in config.json"
            yield (
                f"{source.path}: {strange[0].name} has dtype {strange[0].dtype}; weights must be one of "
                f"{', '.join(sorted(FLOATS))}{why}"
            )
        elif len(found) > 1:
            names = ", ".join(part.info.name for part in parts)
            yield (
                f"{source.path}: {names} have different dtypes ({', '.join(found)}) and cannot share one "
                "parameter; save them in one dtype first"
            )


def fill_item_size(fill: Fill) -> int:
    """Return the bytes of one element of ``fill`` in a buffer."""
    return max(ITEM_SIZES[fill.dtype], ITEM_SIZES[fill.source_dtype])


class Chunking:
    """The chunks of each fill, cached by gather: layers and experts share gathers, so most tensors hit the cache.

    Args:
        buffer_bytes: Size of one buffer; larger rows of fp8 blocks are not split.
    """

    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._known: dict[tuple[int, int, int], tuple[Gather, tuple[Chunk, ...]]] = {}

    def chunks(self, fill: Fill) -> tuple[Chunk, ...]:
        """Return the chunks of ``fill``."""
        gather, size, band = fill.gather, fill_item_size(fill), band_elements(fill)
        key = id(gather), size, band  # the cache keeps the gather alive, so no other object gets its id
        if key not in self._known:
            elements = self._buffer_bytes // size
            if band:
                chunks = split_exactly(gather, max(elements // band, 1) * band)
            else:
                chunks = split(gather, elements)
            self._known[key] = gather, tuple(chunks)
        return self._known[key][1]


def band_elements(fill: Fill) -> int:
    """Return the elements of one row of fp8 blocks, which is never split; 0 without fp8."""
    return 0 if fill.scales is None else BLOCK * fill.gather.shape[-1]


def target_dtypes(params: Iterable[Param], found: Mapping[str, str], cast: str | None) -> dict[str, str]:
    """Return the dtype code of each parameter in the target.

    ``cast`` changes all floating-point parameters except those that stay fp32, such as router biases.
    """
    return {
        name: cast if cast and found[name] in FLOATS and (cast == "F32" or not keep) else found[name]
        for name, keep in ((param.mca_name(), param.keep_fp32) for param in params)
    }


def fills_to_mca(source: ModelSource, target: McaLayout, found: Mapping[str, str]) -> Iterator[Fill]:
    """Yield the fills of an MCA checkpoint's shards; ``found`` are the ``source_dtypes``."""
    plan = target.config.pipeline_plan()
    for param in target.params:
        name = param.mca_name()
        side = shard_count(param, target.config.layout)
        gathers = source.gathers(param, side)
        files = shard_files(param, target.config, plan)
        for file, gather in zip(files, gathers, strict=True):
            yield Fill(file, name, 0, gather, source.parts(param), found[name], target.dtypes[name], param)


def fills_to_hf(source: ModelSource, target: HfLayout, found: Mapping[str, str]) -> Iterator[Fill]:
    """Yield the fills of an HF checkpoint's tensors, including copies of a tied head.

    A weight that is stored in the fp8 blocks to be written is copied with its scales: to quantise what was dequantised
    would change both.

    Args:
        source: The opened checkpoint.
        target: Layout of the new one.
        found: See `source_dtypes`.
    """
    file_of = {name: file for file, names in target.files.items() for name in names}
    for param in target.params:
        gathers = source.gathers(param, HF)
        for name, gather in zip(param.hf_names(), gathers, strict=True):
            start = (param.expert or 0) * prod(gather.shape) if param.stacked else 0
            scales = target.scales.get(name)
            stored = None if scales is None else _stored_blocks(gather, source.parts(param))
            for written in target.written_as(name):
                if scales is not None and stored is not None:
                    yield _copy_fill(file_of[written], written, stored.weight, param)
                    yield _copy_fill(file_of[written], scales, stored.scale, param)
                    continue
                yield Fill(
                    file_of[written],
                    written,
                    start,
                    gather,
                    source.parts(param),
                    found[param.mca_name()],
                    target.tensors[name][0],
                    param,
                    scales,
                )


def _stored_blocks(gather: Gather, parts: tuple[Part, ...]) -> Fp8Tensor | None:
    """Return the stored tensor whose blocks and scales are those to be written as ``gather``; None: there is none."""
    index = gather.moves[0].part if gather.moves else 0
    stored = parts[index].info
    if not isinstance(stored, Fp8Tensor) or gather != _whole(stored.shape, index):
        return None
    blocks = stored.block, stored.weight.dtype, stored.scale.dtype, stored.scale.shape
    return stored if blocks == ((BLOCK, BLOCK), CODE, SCALE_CODE, scale_shape(stored.shape)) else None


def _copy_fill(file: str, name: str, info: TensorInfo, param: Param) -> Fill:
    """Return the fill that copies the stored tensor ``info`` whole."""
    return Fill(file, name, 0, _whole(info.shape), (Part(info, info.shape),), info.dtype, info.dtype, param)


@cache
def _whole(shape: tuple[int, ...], part: int = 0) -> Gather:
    """Return the copy of all of ``part`` in order."""
    size = prod(shape)
    return Gather(shape, (Move(part, 0, 0, size, 1, size, size),))
