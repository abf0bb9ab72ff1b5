"""Assignment of decoder layers to pipeline ranks and virtual stages, with Megatron's arithmetic.

Model order goes over all ranks of virtual stage 0, then of stage 1, and so on. Each chunk has consecutive
layers, so the list of their counts in that order defines the assignment.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from mca_config.errors import McaError
from mca_config.layout import ParallelLayout, parse_layout
from mca_config.printable import counted

_REMEDY = (
    "change pipeline_model_parallel_size{} or virtual_pipeline_model_parallel_size, or give "
    "num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage or pipeline_model_parallel_layout"
)


@dataclass(frozen=True, kw_only=True)
class PipelineChunk:
    """The layers of one virtual stage of one pipeline rank."""

    pp: int
    vp: int
    layers: tuple[int, ...]
    """Global decoder layers, from 0."""
    has_embedding: bool
    """First in the model (``pre_process``)."""
    has_loss: bool
    """Last in the model (``post_process``): output layer."""
    mtp_layers: tuple[int, ...]
    """MTP layers, from 0. A chunk that has some needs the embedding too."""

    def __str__(self) -> str:
        parts = ["embedding"] if self.has_embedding else []
        if self.layers:
            first, last = self.layers[0], self.layers[-1]
            parts.append(f"layer {first}" if first == last else f"layers {first}-{last}")
        parts += [f"mtp {index}" for index in self.mtp_layers]
        parts += ["loss"] if self.has_loss else []
        return ", ".join(parts) or "(empty)"


@dataclass(frozen=True)
class PipelinePlan:
    """All chunks of a model, by pipeline rank and virtual stage."""

    chunks: tuple[tuple[PipelineChunk, ...], ...]
    """``chunks[pp][vp]``."""

    def __iter__(self) -> Iterator[PipelineChunk]:
        """All chunks in model order."""
        for vp in range(len(self.chunks[0])):
            for rank_chunks in self.chunks:
                yield rank_chunks[vp]

    def __str__(self) -> str:
        """A table: a row for each pipeline rank, a column for each virtual stage."""
        rows = [[f"pp {pp}", *map(str, rank_chunks)] for pp, rank_chunks in enumerate(self.chunks)]
        if len(self.chunks[0]) > 1:
            rows.insert(0, ["", *(f"vp {vp}" for vp in range(len(self.chunks[0])))])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)

    @property
    def first(self) -> PipelineChunk:
        """The chunk with the embedding."""
        return self.chunks[0][0]

    @property
    def embedding_ranks(self) -> tuple[int, ...]:
        """The pipeline ranks with a word embedding: the first, and that of the MTP layers."""
        return tuple(sorted({chunk.pp for chunk in self if chunk.has_embedding or chunk.mtp_layers}))

    @property
    def last(self) -> PipelineChunk:
        """The chunk with the loss."""
        return self.chunks[-1][-1]

    @property
    def final_norm(self) -> PipelineChunk:
        """The chunk with the final norm, which Megatron places before the MTP layers, else before the loss."""
        if any(chunk.mtp_layers for chunk in self):
            return self.layer_chunk(max(self._by_layer))
        return self.last

    @cached_property
    def _by_layer(self) -> dict[int, PipelineChunk]:
        return {layer: chunk for chunk in self for layer in chunk.layers}

    def layer_chunk(self, layer: int) -> PipelineChunk:
        """Return the chunk with decoder ``layer``."""
        if layer not in self._by_layer:
            raise McaError(f"layer {layer} is outside the model's {counted(len(self._by_layer), 'layer')}")
        return self._by_layer[layer]

    def mtp_chunk(self, index: int) -> PipelineChunk:
        """Return the chunk with MTP layer ``index``."""
        for chunk in self:
            if index in chunk.mtp_layers:
                return chunk
        raise McaError(f"MTP layer {index} is outside the model")

    def rank_layers(self, pp: int) -> tuple[int, ...]:
        """Return all decoder layers of pipeline rank ``pp``, over its virtual stages."""
        return tuple(layer for chunk in self.chunks[pp] for layer in chunk.layers)


@lru_cache(maxsize=1024)
def pipeline_plan(layout: ParallelLayout, num_layers: int, mtp_num_layers: int = 0) -> PipelinePlan:
    """Assign ``num_layers`` decoder layers to the pipeline of ``layout``.

    MTP layers are in the chunk of the loss, or where the layout string has its ``m``.
    """
    if num_layers < 1:
        raise McaError(f"num_layers must be at least 1, not {num_layers}")
    if layout.pipeline_model_parallel_layout is None:
        counts = (
            _accounted_counts(layout, num_layers)
            if not _is_uneven(layout)
            else _uneven_counts(layout, num_layers)
        )
        mtp_counts = [0] * (len(counts) - 1) + [mtp_num_layers]
    else:
        counts, mtp_counts = _parse_counts(layout, num_layers, mtp_num_layers)
    return PipelinePlan(_make_chunks(counts, mtp_counts, layout))


def _make_chunks(
    counts: list[int], mtp_counts: list[int], layout: ParallelLayout
) -> tuple[tuple[PipelineChunk, ...], ...]:
    chunks: list[PipelineChunk] = []
    start = 0
    for index, (count, mtp_count) in enumerate(zip(counts, mtp_counts, strict=True)):
        vp, pp = divmod(index, layout.pp)
        chunk = PipelineChunk(
            pp=pp,
            vp=vp,
            layers=tuple(range(start, start + count)),
            has_embedding=index == 0,
            has_loss=index == len(counts) - 1,
            mtp_layers=tuple(range(mtp_count)),
        )
        chunks.append(chunk)
        start += count
    return tuple(tuple(chunks[pp :: layout.pp]) for pp in range(layout.pp))


def _is_uneven(layout: ParallelLayout) -> bool:
    return (
        layout.num_layers_in_first_pipeline_stage is not None
        or layout.num_layers_in_last_pipeline_stage is not None
    )


def _accounted_counts(layout: ParallelLayout, num_layers: int) -> list[int]:
    """Return the layer counts of equal chunks, in which the embedding and the loss may each count as one layer."""
    embedding = int(layout.account_for_embedding_in_pipeline_split)
    loss = int(layout.account_for_loss_in_pipeline_split)
    total = num_layers + embedding + loss
    if total % (layout.pp * layout.vpp):
        fitting = [
            size
            for size in range(1, layout.pp)
            if total % (size * layout.vpp) == 0 and (size > 1 or layout.vpp == 1)
        ]
        remedy = _REMEDY.format(f", for example to {fitting[-1]}," if fitting else "")
        note = f" (with embedding or loss counted: {total})" if embedding or loss else ""
        raise McaError(
            f"num_layers {num_layers}{note} cannot be divided into pipeline_model_parallel_size "
            f"{layout.pp} x virtual_pipeline_model_parallel_size {layout.vpp} equal chunks; {remedy}"
        )
    counts = [total // (layout.pp * layout.vpp)] * (layout.pp * layout.vpp)
    counts[0] -= embedding
    counts[-1] -= loss
    return counts


def _uneven_counts(layout: ParallelLayout, num_layers: int) -> list[int]:
    """Return layer counts with the requested sizes of the first and last rank; the others share the rest evenly."""
    first, last = layout.num_layers_in_first_pipeline_stage, layout.num_layers_in_last_pipeline_stage
    if first is not None and last is not None and layout.pp == 2 and layout.vpp > 1:
        raise McaError(
            "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage together leave no "
            "stage between them at pipeline_model_parallel_size 2, which megatron-core cannot interleave; "
            "remove one"
        )
    middle = num_layers - (first or 0) - (last or 0)
    stages = layout.pp - (first is not None) - (last is not None)
    requested = ", ".join(f"{name} {value}" for name, value in _requested_sizes(first, last))
    if middle < 0 or bool(middle) != bool(stages) or (stages and middle % stages):
        raise McaError(
            f"num_layers {num_layers} with {requested} leaves {counted(middle, 'layer')} for "
            f"{counted(stages, 'further pipeline stage')}, which must share them evenly; change one "
            "of these or pipeline_model_parallel_size"
        )
    per_rank = [middle // stages if stages else 0] * layout.pp
    if first is not None:
        per_rank[0] = first
    if last is not None:
        per_rank[-1] = last
    uneven = sorted({count for count in per_rank if count % layout.vpp})
    if uneven:
        raise McaError(
            f"a pipeline rank with {counted(uneven[0], 'layer')} ({requested}) cannot be divided into "
            f"virtual_pipeline_model_parallel_size {layout.vpp} equal chunks; change one of these, or give "
            "pipeline_model_parallel_layout"
        )
    return [count // layout.vpp for count in per_rank] * layout.vpp


def _requested_sizes(first: int | None, last: int | None) -> list[tuple[str, int]]:
    sizes = [("num_layers_in_first_pipeline_stage", first), ("num_layers_in_last_pipeline_stage", last)]
    return [(name, value) for name, value in sizes if value is not None]


def _parse_counts(
    layout: ParallelLayout, num_layers: int, mtp_num_layers: int
) -> tuple[list[int], list[int]]:
    text = layout.pipeline_model_parallel_layout or ""
    stages = parse_layout(text)
    problem = _string_problem("".join(stages), num_layers, mtp_num_layers) or _mtp_problem(stages, layout.pp)
    if problem:
        raise McaError(f"pipeline_model_parallel_layout {text!r}: {problem}")
    return [stage.count("t") for stage in stages], [stage.count("m") for stage in stages]


def _string_problem(flat: str, num_layers: int, mtp_num_layers: int) -> str | None:
    if not flat.startswith("E") or flat.count("E") != 1:
        return f"must begin with its one E (embedding), has {flat.count('E')}"
    if not flat.endswith("L") or flat.count("L") != 1:
        return f"must end with its one L (loss), has {flat.count('L')}"
    if flat.count("t") != num_layers:
        return f"has {flat.count('t')} decoder layers (t), the model has {num_layers}; change the counts of t"
    if flat.count("m") != mtp_num_layers:
        return (
            f"has {flat.count('m')} MTP layers (m), the model has {mtp_num_layers} "
            "(mtp_num_layers); change the count of m"
        )
    if "m" in flat and "t" in flat[flat.index("m") :]:
        return "decoder layers (t) come after an MTP layer (m); move m behind the last t"
    return None


def _mtp_problem(stages: tuple[str, ...], pp: int) -> str | None:
    mtp_stages = [index for index, stage in enumerate(stages) if "m" in stage]
    if len(mtp_stages) > 1:
        return f"m is in {len(mtp_stages)} stages; all MTP layers must share one"
    if mtp_stages and mtp_stages[0] < len(stages) - pp:
        return "m must be in the last virtual stage of its pipeline rank; move it towards the end"
    if mtp_stages and mtp_stages[0] and mtp_stages[0] % pp == 0:
        return (
            "m is on the first pipeline rank but not in its first stage, where megatron-core trains a second "
            "embedding separately from the first; move m to another stage"
        )
    return None
