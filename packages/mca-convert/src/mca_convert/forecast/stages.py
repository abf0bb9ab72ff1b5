"""Contents of each pipeline rank of a planned layout."""

from collections.abc import Iterator
from dataclasses import dataclass

from mca_models.checkpoint.mca_directory import McaLayout


@dataclass(frozen=True)
class PlannedStage:
    """One pipeline rank: its layers, and the sizes of its shards."""

    rank: int
    holds: str
    """Text for people."""
    layers: tuple[int, ...]
    prediction_layers: tuple[int, ...]
    has_embedding: bool
    has_loss: bool
    tensors: int
    dense_bytes: int
    """Bytes of the largest tensor-parallel rank."""
    expert_bytes: int
    """Bytes of the largest expert-parallel rank; 0 without experts."""


def plan_stages(target: McaLayout, sizes: dict[str, int]) -> Iterator[PlannedStage]:
    """Yield the contents of each pipeline rank; ``sizes`` are those of the target's files."""
    plan = target.config.pipeline_plan()
    by_stage: dict[str, list[str]] = {}
    for name in sorted(target.files):
        by_stage.setdefault(name.partition("/")[0], []).append(name)
    for rank in range(target.config.layout.pp):
        files = by_stage.get(f"pp_{rank:03d}", [])
        params = {param.mca_name() for name in files for param, _ in target.files[name]}
        dense = [sizes[name] for name in files if "/tp_" in name]
        experts = [sizes[name] for name in files if "/ep_" in name]
        chunks = plan.chunks[rank]
        yield PlannedStage(
            rank=rank,
            holds="; ".join(map(str, chunks)),
            layers=plan.rank_layers(rank),
            prediction_layers=tuple(layer for chunk in chunks for layer in chunk.mtp_layers),
            has_embedding=any(chunk.has_embedding for chunk in chunks),
            has_loss=any(chunk.has_loss for chunk in chunks),
            tensors=len(params),
            dense_bytes=max(dense, default=0),
            expert_bytes=max(experts, default=0),
        )
