"""Vocabulary rows that the checkpoint lacks, the same on every rank and layout.

A new row is the mean of the old rows plus noise: a tenth of the old rows' standard deviation, drawn for each column
by a generator that depends on the seed and the parameter alone. Only the first rank reads all old rows, in blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mca_config.errors import McaError
from mca_models.megatron.distributed.collectives import run_on_first_rank_unwrapped
from mca_models.megatron.tensors import copy_finite, seeded_generator, to_torch
from mca_models.storage.source import ModelSource, read_shard
from mca_models.weights import Param

_BLOCKS = 64
_NOISE = 0.1
_Rows = NDArray[np.float64]

Statistics = dict[str, tuple[Tensor, Tensor]]
"""Mean and standard deviation over the old rows, ``[hidden]`` in fp64, by canonical name."""


@dataclass(frozen=True)
class VocabularyGrowth:
    """Sizes and statistics from which new rows are drawn; the same on every rank.

    Args:
        old: Rows of the checkpoint.
        new: Rows of the model.
        seed: Seed of the noise.
        statistics: Mean and deviation of each parameter over the vocabulary.
    """

    old: int
    new: int
    seed: int
    statistics: Statistics

    def rows(self, name: str) -> Tensor:
        """Draw all new rows of parameter ``name``: fp64 ``[new - old, hidden]``, or ``[new - old]`` of a logit bias."""
        mean, deviation = self.statistics[name]
        generator = seeded_generator(f"vocabulary/{self.seed}/{name}")
        noise = torch.randn(self.new - self.old, *mean.shape, generator=generator, dtype=torch.float64)
        return mean + _NOISE * deviation * noise


def require_growth(old: int, new: int) -> None:
    """Raise if ``new`` would drop rows."""
    if new < old:
        raise McaError(
            f"vocab_size {new} is less than the checkpoint's {old}; rows are only added: use {old} or more"
        )


def plan_growth(source: ModelSource, new: int, seed: int) -> VocabularyGrowth:
    """Compute the statistics to grow ``source``'s vocabulary to ``new`` rows; collective."""

    def statistics() -> Statistics:
        return {param.mca_name(): _statistics(source, param) for param in source.params if param.vocab}

    return VocabularyGrowth(source.config.vocab_size, new, seed, run_on_first_rank_unwrapped(statistics))


def _statistics(source: ModelSource, param: Param) -> tuple[Tensor, Tensor]:
    """Compute mean and deviation of the rows, in two passes over blocks."""
    old = source.config.vocab_size
    mean: _Rows | float = 0.0
    squares: _Rows | float = 0.0
    for block in _blocks(source, param):
        mean = mean + block.sum(0) / old
    for block in _blocks(source, param):
        squares = squares + np.square(block - mean).sum(0) / old
    return torch.as_tensor(mean), torch.as_tensor(squares).sqrt()


def _blocks(source: ModelSource, param: Param) -> Iterator[_Rows]:
    """Yield all old rows of ``param`` in blocks."""
    left = source.config.vocab_size
    for number in range(_BLOCKS):
        block = read_shard(source, param, number, _BLOCKS)[:left].astype(np.float64)
        left -= len(block)
        yield block


def grown_piece(
    source: ModelSource, param: Param, growth: VocabularyGrowth, live: Tensor, rank: int
) -> Tensor:
    """Return the rows of ``param`` on tensor rank ``rank``: old ones, new ones, then zeros.

    Args:
        source: The checkpoint.
        param: A parameter over the vocabulary, as stored.
        growth: From ``plan_growth``.
        live: The tensor to fill, which gives shape and dtype.
        rank: Tensor rank; each has ``len(live)`` rows.
    """
    share = live.shape[0]
    first = rank * share
    out = torch.zeros(live.shape, dtype=live.dtype)
    height = -(-growth.old // _BLOCKS)
    for number in range(first // height, _BLOCKS):
        start, stop = max(number * height, first), min((number + 1) * height, growth.old, first + share)
        if start < stop:
            block = to_torch(read_shard(source, param, number, _BLOCKS))
            rows = block[start - number * height : stop - number * height]
            copy_finite(out[start - first : stop - first], rows, param.mca_name())
    start, stop = max(growth.old, first), min(growth.new, first + share)
    if start < stop:
        fresh = growth.rows(param.mca_name())
        out[start - first : stop - first] = fresh[start - growth.old : stop - growth.old]
    return out
