"""The figures of ``mca-train plan --plot``: schedule, memory, layers, messages."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from mca_config.layout import RankGrid
from mca_config.pipeline import PipelinePlan
from mca_train.dry_run.stages import DryRun, describe_step
from mca_train.dry_run.step import StepNeeds
from mca_train.dry_run.tracker import Message
from mca_train.plan.memory import GIB, describe_chunk
from mca_train.plan.schedule import Pass, TimedPass, timeline
from mca_train.plots import BACKWARD, CHUNKS, COLOURS, make_axes, save

_AXES = ("tp", "cp", "dp", "dp-cp", "tp-cp", "tp-dp-cp", "pp", "ep", "etp", "etp-ep", "edp", "tp-pp")


def draw_all(
    folder: Path, dry_run: DryRun, plan: PipelinePlan, grid: RankGrid, limit_gib: float | None
) -> list[Path]:
    """Write all figures into ``folder``.

    Args:
        folder: An existing folder.
        dry_run: Dry run with the order of passes on all stages.
        plan: Layers on stages.
        grid: Rank grid.
        limit_gib: Usable memory of the device; None: no line.
    """
    ran = run_timeline(dry_run.stages, len(plan.chunks[0]))
    return [
        *draw_schedule(folder, ran, len(dry_run.stages), dry_run.accumulated),
        *draw_memory(folder, dry_run, limit_gib),
        *draw_step(folder, dry_run, limit_gib),
        *draw_layers(folder, plan),
        *draw_messages(folder, dry_run, grid),
    ]


def run_timeline(stages: Sequence[StepNeeds], chunks: int) -> list[TimedPass]:
    """Return the start and end of each pass, with FLOPs as time and backward passes twice as long as forward passes."""
    work = {stage.stage: stage.flops / max(stage.micro_batches * chunks, 1) for stage in stages}
    most = max(work.values()) or 1.0

    def duration(rank: int, step: Pass) -> float:
        return max(work[rank] / most, 0.05) * (1.0 if step.forward else 2.0)

    return timeline([stage.order for stage in stages], chunks, duration)


def bubble_fraction(ran: Sequence[TimedPass], ranks: int, micro_batches: int) -> float:
    """Return the pipeline bubble of a step of ``micro_batches``; those not in ``ran`` repeat the others."""
    busy = [0.0] * ranks
    for run in ran:
        busy[run.rank] += run.end - run.start
    shown = 1 + max(run.step.micro_batch for run in ran)
    further = micro_batches / shown - 1
    end = max(run.end for run in ran) + further * max(busy)
    return 1 - sum(busy) * (1 + further) / (end * ranks)


def draw_schedule(folder: Path, ran: Sequence[TimedPass], ranks: int, accumulated: int) -> list[Path]:
    """Draw the passes of every pipeline rank over time; gaps are the bubble."""
    end, shown = max(run.end for run in ran), 1 + max(run.step.micro_batch for run in ran)
    width = min(max(8.0, end * 0.2), 30.0)
    title = (
        f"schedule as the engine runs it; {bubble_fraction(ran, ranks, accumulated):.0%} waiting in a step"
    )
    if shown < accumulated:
        title += (
            f" of {accumulated} micro-batches, {bubble_fraction(ran, ranks, shown):.0%} in the {shown} shown"
        )
    figure, found = make_axes(width, 1.6 + 0.32 * ranks, title)
    chunks = 1 + max(run.step.chunk for run in ran)
    for run in ran:
        colours = CHUNKS if run.step.forward else BACKWARD
        length = run.end - run.start
        found.barh(
            run.rank,
            length,
            left=run.start,
            height=0.86,
            color=colours[run.step.chunk % len(colours)],
            edgecolor="white",
            linewidth=0.5,
        )
        if length / end * width > 0.12:
            text = str(run.step.micro_batch)
            middle = run.start + length / 2
            found.text(middle, run.rank, text, ha="center", va="center", fontsize=5 if len(text) > 1 else 7)
    found.set_yticks(range(ranks), [f"stage {rank}" for rank in range(ranks)], fontsize=8)
    found.invert_yaxis()
    found.set_xlim(0, end)
    found.set_xlabel("time, in forward passes of the slowest chunk; numbers are micro-batches", fontsize=8)
    _add_chunk_legend(found, chunks)
    return save(figure, folder, "schedule")


def _add_chunk_legend(found: Any, chunks: int) -> None:
    from matplotlib.patches import Patch

    marks = []
    for chunk in range(min(chunks, len(CHUNKS))):
        suffix = f" of chunk {chunk}" if chunks > 1 else ""
        marks += [Patch(color=CHUNKS[chunk], label=f"forward{suffix}")]
        marks += [Patch(color=BACKWARD[chunk], label=f"backward{suffix}")]
    found.legend(
        handles=marks,
        fontsize=7,
        ncols=min(len(marks), 8),
        frameon=False,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
    )


def draw_memory(folder: Path, dry_run: DryRun, limit_gib: float | None) -> list[Path]:
    """Draw the peak memory of every stage as bars."""
    stages, title = dry_run.stages, "memory of a rank of each stage at its peak"
    figure, found = make_axes(max(6.0, 2.5 + 0.62 * len(stages)), 4.6, title, dry_run.note)
    bottoms = [0.0] * len(stages)
    for part, colour in COLOURS.items():
        sizes = [getattr(stage, part) / GIB for stage in stages]
        if any(sizes):
            found.bar(range(len(stages)), sizes, bottom=bottoms, color=colour, label=part, width=0.74)
            bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    for place, total in enumerate(bottoms):
        found.text(place, total, f"{total:.3g}", ha="center", va="bottom", fontsize=8)
    if limit_gib is not None:
        found.axhline(limit_gib, color="black", linewidth=1.2, linestyle="--")
        found.text(
            len(stages) - 0.5, limit_gib, f"{limit_gib:.1f} usable ", ha="right", va="bottom", fontsize=8
        )
    found.set_ylim(0, max([*bottoms, limit_gib or 0.0]) * 1.1 or 1.0)
    found.set_xticks(range(len(stages)), [str(stage.stage) for stage in stages], fontsize=8)
    found.set_xlabel("stage")
    found.set_ylabel("GiB")
    found.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return save(figure, folder, "memory")


def draw_step(folder: Path, dry_run: DryRun, limit_gib: float | None) -> list[Path]:
    """Draw the memory over a step of the stage with the highest peak."""
    stage = dry_run.fullest
    figure, found = make_axes(
        9.0, 3.6, f"memory over the step, stage {stage.stage} (the fullest)", dry_run.note
    )
    curve = [size / GIB for size in stage.curve]
    found.fill_between(range(len(curve)), curve, color=COLOURS["activations"], alpha=0.35, linewidth=0)
    found.plot(curve, color=COLOURS["activations"], linewidth=1.0)
    fixed = (stage.weights + stage.gradients + stage.optimizer + stage.reference) / GIB
    found.axhline(fixed, color=COLOURS["weights"], linewidth=1.0)
    found.text(0, fixed, " weights, gradients, optimizer", va="top", fontsize=8, color=COLOURS["weights"])
    top = curve.index(max(curve))
    where = f"{'backward of ' if stage.backward else ''}{stage.module or 'loss and schedule'}"
    found.annotate(
        f"{stage.peak / GIB:.3g} GiB: {where}",
        (top, curve[top]),
        xytext=(0, 8),
        textcoords="offset points",
        fontsize=8,
        ha="left" if top < len(curve) / 2 else "right",
    )
    if limit_gib is not None and limit_gib < 2.5 * max(curve):
        found.axhline(limit_gib, color="black", linewidth=1.2, linestyle="--")
    found.set_ylim(0, max(curve) * 1.2)
    found.set_xlim(0, len(curve) - 1)
    found.set_xticks([])
    found.set_xlabel("allocations and releases, in order")
    found.set_ylabel("GiB")
    return save(figure, folder, "memory_over_step")


def draw_layers(folder: Path, plan: PipelinePlan) -> list[Path]:
    """Draw the layers of each stage and chunk."""
    ranks, chunks = len(plan.chunks), len(plan.chunks[0])
    figure, found = make_axes(max(6.0, 1.5 + 1.9 * chunks), 1.4 + 0.32 * ranks, "layers on stages")
    for rank, rank_chunks in enumerate(plan.chunks):
        for vp, chunk in enumerate(rank_chunks):
            ends = chunk.has_embedding or chunk.has_loss
            colour = "#ffe0b8" if ends else CHUNKS[1] if vp % 2 else "#d5e5f2"
            found.barh(rank, 0.96, left=vp + 0.02, height=0.86, color=colour)
            found.text(vp + 0.5, rank, describe_chunk(chunk), ha="center", va="center", fontsize=8)
    found.set_yticks(range(ranks), [f"stage {rank}" for rank in range(ranks)], fontsize=8)
    found.invert_yaxis()
    found.set_xticks([c + 0.5 for c in range(chunks)], [f"chunk {c}" for c in range(chunks)], fontsize=8)
    found.set_xlim(0, chunks)
    found.spines[["left", "bottom"]].set_visible(False)
    found.tick_params(length=0)
    return save(figure, folder, "layers")


def draw_messages(folder: Path, dry_run: DryRun, grid: RankGrid) -> list[Path]:
    """Draw the communication of a rank of the stage with the highest peak in a step, by process group."""
    stage, accumulated = dry_run.fullest, dry_run.accumulated
    sent = (message for message in stage.messages_in_step(accumulated) if message.bytes)
    largest = sorted(sent, key=lambda message: message.bytes)[-14:]
    title = f"messages of rank {stage.rank} (stage {stage.stage}) in {describe_step(stage, accumulated)}"
    figure, found = make_axes(9.0, 1.4 + 0.36 * max(len(largest), 1), title)
    sizes = [message.bytes / GIB for message in largest]
    found.barh(range(len(largest)), sizes, color=COLOURS["weights"], height=0.7)
    names = [f"{_short(message.operation)}, {group_name(message, stage.rank, grid)}" for message in largest]
    found.set_yticks(range(len(largest)), names, fontsize=8)
    for row, message in enumerate(largest):
        found.text(
            sizes[row], row, f" {_size(message.bytes)}, {message.count} times", va="center", fontsize=8
        )
    found.set_xlim(0, max(sizes, default=1.0) * 1.35)
    found.set_xlabel("GiB")
    return save(figure, folder, "messages")


def _short(operation: str) -> str:
    return operation.strip("_").replace("_base", "").replace("tensor_coalesced", "coalesced")


def _size(nbytes: int) -> str:
    """Return a size in the largest unit that it reaches."""
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} bytes"


def group_name(message: Message, rank: int, grid: RankGrid) -> str:
    """Return the axes along which the ranks of ``message`` differ, and the number of ranks."""
    ranks = tuple(sorted(message.ranks))
    if len(ranks) == grid.world_size:
        return f"all {len(ranks)} ranks"
    if len(ranks) == 1:
        return "itself"
    for axis in _AXES:
        if tuple(sorted(grid.rank_group(axis, rank))) == ranks:
            return f"{axis} ({len(ranks)} ranks)"
    apart = {second - first for first, second in pairwise(ranks)}
    return f"{len(ranks)} ranks, {', '.join(map(str, sorted(apart)[:2]))} apart"
