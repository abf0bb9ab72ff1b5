"""Which decoder layers stand on which pipeline rank and virtual stage, by Megatron's own arithmetic.

Chunks follow one another in model order over all ranks of virtual stage 0, then of stage 1, and so on;
each holds a run of consecutive layers, so a list of run lengths in that order says everything.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_config.layout_string import parse_layout
from mca_config.printable import counted


@dataclass(frozen=True, kw_only=True)
class PipelineChunk:
    """What one virtual stage of one pipeline rank holds."""

    pp: int
    vp: int
    layers: tuple[int, ...]
    """Global decoder layers, from 0."""
    has_embedding: bool
    """First in the model (``pre_process``)."""
    has_loss: bool
    """Last in the model (``post_process``): output layer."""
    mtp_layers: tuple[int, ...]
    """Multi-token-prediction layers, from 0. A chunk that has some needs the embedding too."""

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
            for of_rank in self.chunks:
                yield of_rank[vp]

    def __str__(self) -> str:
        """A table: a row for each pipeline rank, a column for each virtual stage."""
        rows = [[f"pp {pp}", *map(str, of_rank)] for pp, of_rank in enumerate(self.chunks)]
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
        """The pipeline ranks that embed tokens: the first, and that of the prediction layers."""
        return tuple(sorted({chunk.pp for chunk in self if chunk.has_embedding or chunk.mtp_layers}))

    @property
    def last(self) -> PipelineChunk:
        """The chunk with the loss."""
        return self.chunks[-1][-1]

    @property
    def final_norm(self) -> PipelineChunk:
        """The chunk with the final norm, which Megatron has before prediction layers, else before the loss."""
        if any(chunk.mtp_layers for chunk in self):
            return self.chunk_of_layer(max(self._by_layer))
        return self.last

    @cached_property
    def _by_layer(self) -> dict[int, PipelineChunk]:
        return {layer: chunk for chunk in self for layer in chunk.layers}

    def chunk_of_layer(self, layer: int) -> PipelineChunk:
        """The chunk that holds decoder ``layer``."""
        if layer not in self._by_layer:
            raise McaError(f"layer {layer} is outside the model's {counted(len(self._by_layer), 'layer')}")
        return self._by_layer[layer]

    def chunk_of_mtp(self, index: int) -> PipelineChunk:
        """The chunk that holds multi-token-prediction layer ``index``."""
        for chunk in self:
            if index in chunk.mtp_layers:
                return chunk
        raise McaError(f"multi-token-prediction layer {index} is outside the model")

    def layers_of_rank(self, pp: int) -> tuple[int, ...]:
        """All decoder layers of pipeline rank ``pp``, over its virtual stages."""
        return tuple(layer for chunk in self.chunks[pp] for layer in chunk.layers)


@lru_cache(maxsize=1024)
def pipeline_plan(layout: ParallelLayout, num_layers: int, mtp_num_layers: int = 0) -> PipelinePlan:
    """Lays ``num_layers`` decoder layers over the pipeline of ``layout``.

    Multi-token-prediction layers stand with the loss, or where the layout string has its ``m``.
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
        counts, mtp_counts = _counts_of_string(layout, num_layers, mtp_num_layers)
    return PipelinePlan(_lay_out(counts, mtp_counts, layout))


def _lay_out(
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


_REMEDY = (
    "change pipeline_model_parallel_size or virtual_pipeline_model_parallel_size, or give "
    "num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage or pipeline_model_parallel_layout"
)


def _accounted_counts(layout: ParallelLayout, num_layers: int) -> list[int]:
    """Equal chunks, of which the embedding and the loss may each take the place of one layer."""
    embedding = int(layout.account_for_embedding_in_pipeline_split)
    loss = int(layout.account_for_loss_in_pipeline_split)
    places = num_layers + embedding + loss
    if places % (layout.pp * layout.vpp):
        counted = f" (with embedding or loss counted: {places})" if embedding or loss else ""
        raise McaError(
            f"num_layers {num_layers}{counted} cannot be divided into pipeline_model_parallel_size "
            f"{layout.pp} x virtual_pipeline_model_parallel_size {layout.vpp} equal chunks; {_REMEDY}"
        )
    counts = [places // (layout.pp * layout.vpp)] * (layout.pp * layout.vpp)
    counts[0] -= embedding
    counts[-1] -= loss
    if min(counts) < 0:
        raise McaError(
            f"num_layers {num_layers} leaves no room for the embedding and the loss in one chunk; remove "
            "account_for_embedding_in_pipeline_split or account_for_loss_in_pipeline_split"
        )
    return counts


def _uneven_counts(layout: ParallelLayout, num_layers: int) -> list[int]:
    """The first and last rank hold what was asked for, the others share the rest evenly."""
    first, last = layout.num_layers_in_first_pipeline_stage, layout.num_layers_in_last_pipeline_stage
    if first is not None and last is not None and layout.pp == 2 and layout.vpp > 1:
        raise McaError(
            "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage together leave no "
            "stage between them at pipeline_model_parallel_size 2, which megatron-core cannot interleave; "
            "remove one"
        )
    middle = num_layers - (first or 0) - (last or 0)
    stages = layout.pp - (first is not None) - (last is not None)
    asked = ", ".join(f"{name} {value}" for name, value in _asked(first, last))
    if middle < 0 or bool(middle) != bool(stages) or (stages and middle % stages):
        raise McaError(
            f"num_layers {num_layers} with {asked} leaves {counted(middle, 'layer')} for "
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
            f"a pipeline rank with {counted(uneven[0], 'layer')} ({asked}) cannot be divided into "
            f"virtual_pipeline_model_parallel_size {layout.vpp} equal chunks; change one of these, or give "
            "pipeline_model_parallel_layout"
        )
    return [count // layout.vpp for count in per_rank] * layout.vpp


def _asked(first: int | None, last: int | None) -> list[tuple[str, int]]:
    asked = [("num_layers_in_first_pipeline_stage", first), ("num_layers_in_last_pipeline_stage", last)]
    return [(name, value) for name, value in asked if value is not None]


def _counts_of_string(
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
            f"has {flat.count('m')} multi-token-prediction layers (m), the model has {mtp_num_layers} "
            "(mtp_num_layers); change the count of m"
        )
    if "m" in flat and "t" in flat[flat.index("m") :]:
        return "decoder layers (t) stand after a multi-token-prediction layer (m); move m behind the last t"
    return None


def _mtp_problem(stages: tuple[str, ...], pp: int) -> str | None:
    holders = [index for index, stage in enumerate(stages) if "m" in stage]
    if len(holders) > 1:
        return f"m stands in {len(holders)} stages; all multi-token-prediction layers must share one"
    if holders and holders[0] < len(stages) - pp:
        return "m must stand in the last virtual stage of its pipeline rank; move it towards the end"
    if holders and holders[0] and holders[0] % pp == 0:
        return (
            "m stands on the first pipeline rank but not in its first stage, where megatron-core trains a second "
            "embedding apart from the first; move m to another stage"
        )
    return None
