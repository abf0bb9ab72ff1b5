"""Rules of weight templates: parameters and their shards.

A rule says two independent things about one Megatron parameter. Its *layouts* say how the HF tensors
make up the whole parameter; its *shard* says how the whole is cut over ranks:

    HF tensors --hf_layout.unpack--> parts --layout.pack--> whole --shard.take--> this rank's piece

Every step is pure, reads no global state, and has an exact inverse. Names are generated from a rule,
never parsed, so completeness of a checkpoint is equality of two sets of names.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property
from itertools import product

from mca_models.weights.arrays import Array, concat, cut, split_ratio
from mca_models.weights.layouts import SEPARATE, Layout


@dataclass(frozen=True)
class Shard:
    """Split of a full parameter over tensor-parallel (or expert-tensor-parallel) ranks.

    Args:
        axis: The axis that is cut into equal shares; None if every rank holds all of it.
        segments: A fused axis holds several segments, with their lengths in this proportion, and every
            rank gets a share of each: with ``(1, 1)`` and tp=2, rank 0 of [gate, up] holds [gate 0, up 0].
    """

    axis: int | None
    segments: tuple[int, ...] = (1,)

    def take(self, whole: Array, rank: int, size: int) -> Array:
        """The piece of ``whole`` that ``rank`` of ``size`` holds.

        Raises:
            ValueError: The axis does not divide by ``size``.
        """
        if self.axis is None or size == 1:
            return whole
        shares = []
        for segment in split_ratio(whole, self.axis, self.segments):
            length, rest = divmod(segment.shape[self.axis], size)
            if rest:
                raise ValueError(
                    f"axis {self.axis} of {tuple(segment.shape)} does not divide by {size} ranks"
                )
            shares.append(cut(segment, self.axis, rank * length, (rank + 1) * length))
        return concat(shares, self.axis)

    def join(self, pieces: Sequence[Array]) -> Array:
        """The whole, from the pieces of all ranks in rank order."""
        if self.axis is None or len(pieces) == 1:
            return pieces[0]
        by_rank = [split_ratio(piece, self.axis, self.segments) for piece in pieces]
        return concat([concat(shares, self.axis) for shares in zip(*by_rank, strict=True)], self.axis)


REPLICATED = Shard(None)  # every rank holds all of it
COLUMN = Shard(0)  # [out / tp, in]; also biases [out / tp] and vocabulary rows
ROW = Shard(1)  # [out, in / tp]
GATED = Shard(0, segments=(1, 1))  # [gate, up], both column-cut


class Stage(Enum):
    """Pipeline stage that holds a parameter."""

    FIRST = "first"  # the chunk with the embedding
    LAYER = "layer"  # the chunk that holds decoder layer ``Param.layer``
    NORM = "norm"  # the chunk with the final norm: that of the loss, or before MTP layers
    LAST = "last"  # the chunk with the loss
    MTP = "mtp"  # the chunk that holds MTP layer ``Param.layer``
    VISION = "vision"  # the chunk with the embedding, and never a copy of it
    PASSTHROUGH = "passthrough"  # no model builds it; files store it with the loss


@dataclass(frozen=True, kw_only=True)
class Param:
    """One Megatron parameter and the HF tensors it is made of.

    ``mca`` and ``hf`` may contain ``{layer}`` and ``{expert}``, filled from the fields of those names
    (``{hf_layer}`` too: where the HF model numbers a layer otherwise).

    Args:
        mca: Global Megatron name, Transformer Engine spelling.
        hf: Names of the HF tensors that make it up, in the order that ``hf_layout`` takes them.
        shard: How the whole is cut over tp (dense) or etp (``expert`` set) ranks.
        layout: How the parts make up the whole.
        hf_layout: How the parts lie in the HF tensors.
        stage: Which pipeline stage holds it.
        vocab: Axis 0 counts vocabulary rows, which are padded to a multiple of tp.
        alias_of: Canonical name of the parameter this one is a second copy of (a tied head): filled from
            HF, never stored in an MCA checkpoint and never written back.
        stacked: The HF tensors have a leading expert axis, of which this parameter is entry ``expert``.
        keep_fp32: Stays fp32 when the model is cast (router biases, some routers and sinks).
        layer: Decoder (or MTP) layer, from 0.
        hf_layer: The HF model's number of that layer; ``layer`` if None.
        expert: Global expert index; None for dense parameters.
        shape: Of the whole, where no table says it (vision models, what is carried).
    """

    mca: str
    hf: tuple[str, ...]
    shard: Shard = REPLICATED
    layout: Layout = SEPARATE
    hf_layout: Layout = SEPARATE
    stage: Stage = Stage.LAYER
    vocab: bool = False
    alias_of: str | None = None
    stacked: bool = False
    keep_fp32: bool = False
    layer: int | None = None
    hf_layer: int | None = None
    expert: int | None = None
    shape: tuple[int, ...] | None = None

    def hf_names(self) -> tuple[str, ...]:
        """The HF tensors that this parameter is made of."""
        return self._hf_names

    @cached_property
    def _hf_names(self) -> tuple[str, ...]:
        layer = self.layer if self.hf_layer is None else self.hf_layer
        return tuple([name.format(layer=layer, expert=self.expert) for name in self.hf])

    def mca_name(self) -> str:
        """The canonical (global) name in an MCA checkpoint."""
        return self._mca_name

    @cached_property
    def _mca_name(self) -> str:
        return self.mca.format(layer=self.layer, expert=self.expert)

    def to_full(self, hf: Sequence[Array]) -> Array:
        """The unsharded Megatron parameter, from its HF tensors."""
        tensors = [x[self.expert] for x in hf] if self.stacked else list(hf)
        (whole,) = self.layout.pack(self.hf_layout.unpack(tensors))
        return whole

    def from_full(self, whole: Array) -> tuple[Array, ...]:
        """The HF tensors inside the unsharded parameter (a stacked one's entry, without its expert axis)."""
        return self.hf_layout.pack(self.layout.unpack((whole,)))

    def to_mca(self, hf: Sequence[Array], rank: int = 0, size: int = 1) -> Array:
        """The piece that ``rank`` of ``size`` (tp, or etp for an expert) holds."""
        return self.shard.take(self.to_full(hf), rank, size)

    def to_hf(self, pieces: Sequence[Array]) -> tuple[Array, ...]:
        """The HF tensors, from the pieces of all ranks in rank order."""
        return self.from_full(self.shard.join(pieces))


def expand_rules(
    rules: Sequence[Param], *, layers: Iterable[int], experts: Iterable[int | None] = (None,)
) -> Iterator[Param]:
    """``rules`` for every layer and expert, in that order."""
    found = [(type(rule), _field_values(rule)) for rule in rules]
    for layer, expert in product(layers, list(experts)):
        for kind, values in found:
            param = object.__new__(kind)  # models have 100,000: `replace` takes four times as long
            vars(param).update(values, layer=layer, expert=expert)
            yield param


def _field_values(rule: Param) -> dict[str, object]:
    """Return the values of the fields of ``rule``, without the names that it has computed from them."""
    return {field.name: getattr(rule, field.name) for field in fields(rule)}
