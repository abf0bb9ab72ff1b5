"""Dry runs of all pipeline stages, one rank of each, in separate processes, and their report as text and JSON."""

import multiprocessing
import os
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

import torch

from mca_config.errors import McaError
from mca_config.layout import ParallelLayout, RankGrid
from mca_config.printable import counted
from mca_config.types import JsonObject
from mca_models.megatron import platform
from mca_train.dry_run.step import StepNeeds, measure_step
from mca_train.dry_run.tracker import Message
from mca_train.plan.chunks import Implementation
from mca_train.plan.memory import GIB

if TYPE_CHECKING:
    from mca_config.model_config import McaModelConfig
    from mca_train.config.run_config import Settings
    from mca_train.plan.audio_memory import PlannedMedia
    from mca_train.tasks.task import Task


_COLUMNS = ("weights", "gradients", "optimizer", "reference", "activations", "temporaries", "peak")
_SHOWN = 12
SCHEMA, VERSION = "mca-train/dry-run", 1


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Result of a dry run.

    Args:
        stages: Needs of one rank per pipeline stage.
        accumulated: Micro-batches per step of the run.
        implementation: Implementation of the layers that ran.
        note: How the layers differ from those on the planned device; None: they do not differ.
    """

    stages: Sequence[StepNeeds]
    accumulated: int
    implementation: Implementation
    note: str | None = None

    @property
    def fullest(self) -> StepNeeds:
        """Stage with the highest peak."""
        return max(self.stages, key=lambda stage: stage.peak)


def measure_stages(
    task: "Task",
    settings: "Settings",
    model: "McaModelConfig",
    layout: ParallelLayout,
    world_size: int,
    *,
    ordered: bool = False,
    media: "PlannedMedia | None" = None,
) -> list[StepNeeds]:
    """Measure the needs of the first rank of each pipeline stage in one step.

    Args:
        task: The kind of run.
        settings: Configuration of the run.
        model: Configuration of the model.
        layout: Parallel layout.
        world_size: Number of ranks.
        ordered: Return the schedule of the first stage's micro-batches on all stages, for a common timeline.
        media: Media of each sequence; None: there are none.
    """
    platform.prepare()  # here and below: imports that every process would repeat
    import_module("mca_train.trainer.trainer")
    accumulated = settings.training.gradient_accumulation_steps
    group = settings.training.microbatch_group_size_per_vp_stage
    grid = RankGrid(layout, world_size)
    return _in_processes(
        [
            partial(
                measure_step,
                task,
                settings,
                model,
                rank,
                world_size,
                count_micro_batches(accumulated, layout, stage, group),
                media,
                count_micro_batches(accumulated, layout, 0, group) if ordered else 0,
            )
            for stage, rank in enumerate(_first_ranks(grid))
        ]
    )


def count_micro_batches(
    accumulated: int, layout: ParallelLayout, stage: int, group: int | None = None
) -> int:
    """Return the number of micro-batches a stage holds at once, plus one; more need no more memory.

    The interleaved schedule runs whole groups of micro-batches (``group``, or pp), so at least two times pp are rounded
    up to whole groups.
    """
    if layout.vpp == 1:
        return min(accumulated, layout.pp - stage + 1)
    whole = group or layout.pp
    return min(accumulated, -(-2 * layout.pp // whole) * whole)


def _in_processes(work: Sequence[Callable[[], StepNeeds]]) -> list[StepNeeds]:
    """Run each item of ``work`` in a forked process, one per core at a time, and return the results."""
    waiting, running, found = deque(enumerate(work)), dict[Connection, int](), dict[int, StepNeeds]()
    try:
        while waiting or running:
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                number, task = waiting.popleft()
                running[_start(task)] = number
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                found[running.pop(connection)] = _receive(connection)
    finally:
        for process in multiprocessing.active_children():
            process.kill()
    return [found[number] for number in range(len(work))]


def _start(task: Callable[[], StepNeeds]) -> Connection:
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe(duplex=False)
    context.Process(target=_run_and_send, args=(task, its), daemon=True).start()
    its.close()
    return mine


def _run_and_send(task: Callable[[], StepNeeds], connection: Connection) -> None:
    # a fork recreates its thread pool at first use; if autograd's threads do so first, the process aborts
    torch.set_num_threads(torch.get_num_threads())
    try:
        result: StepNeeds | BaseException = task()
    except Exception as error:  # reported by the parent, once
        result = _sendable(error)
    connection.send(result)


def _sendable(error: Exception) -> Exception:
    """Return ``error`` if it can be pickled, else a `McaError` with its message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return McaError(f"{type(error).__name__}: {error}")
    return error


def _receive(connection: Connection) -> StepNeeds:
    try:
        result = connection.recv()
    except EOFError:
        raise McaError(
            "a process of the dry run was killed, perhaps because memory ran out"
            "; free memory, or plan without --dry_run"
        ) from None
    if isinstance(result, BaseException):
        raise result
    assert isinstance(result, StepNeeds)
    return result


def _first_ranks(grid: RankGrid) -> list[int]:
    found: dict[int, int] = {}
    for rank in range(grid.world_size):
        found.setdefault(grid.coordinates(rank).pp, rank)
        if len(found) == grid.layout.pp:
            break
    return [found[pp] for pp in range(grid.layout.pp)]


def render_dry_run(dry_run: DryRun) -> str:
    """Render the needs of each stage, and the messages of the stage with the highest peak."""
    stages, accumulated, fullest = dry_run.stages, dry_run.accumulated, dry_run.fullest
    ran = [stage.micro_batches for stage in stages]
    count = f"{min(ran)} to {max(ran)}" if len(set(ran)) > 1 else str(ran[0])
    more = (
        ""
        if set(ran) == {accumulated}
        else f" of {accumulated}, because more micro-batches need no more memory"
    )
    columns = [name for name in _COLUMNS if name != "reference" or any(s.reference for s in stages)]
    lines = [
        f"dry run      one step by the run's own engine on fake tensors; micro-batches: {count}{more}",
        *([f"             {dry_run.note}"] if dry_run.note else []),
        "",
        f"{'stage':>5}{'rank':>7}" + "".join(f"{name:>13}" for name in columns) + "   at the peak",
    ]
    for stage in stages:
        cells = "".join(f"{getattr(stage, name) / GIB:>13.3f}" for name in columns)
        lines.append(f"{stage.stage:>5}{stage.rank:>7}{cells}   {_peak_location(stage)}")
    lines += [
        "",
        "GiB at the peak of a rank of each stage; kernels, allocators and communication buffers come on top",
        f"computed     {_flops(stages, accumulated) / 1e12:,.3g} TFLOP a step by these ranks",
        f"messages     of rank {fullest.rank}, stage {fullest.stage}, in {describe_step(fullest, accumulated)}:",
    ]
    messages = sorted(fullest.messages_in_step(accumulated), key=lambda message: -message.bytes)
    lines += [f"  {_format_message(message)}" for message in messages[:_SHOWN] if message.bytes]
    return "\n".join(lines) + "\n"


def describe_step(stage: StepNeeds, accumulated: int) -> str:
    """Return the number of micro-batches in a step, and how many of them ran."""
    ran = "" if stage.micro_batches == accumulated else f", {stage.micro_batches} of which were run"
    return f"a step of {accumulated} micro-batch{'es' * (accumulated != 1)}{ran}"


def _flops(stages: Sequence[StepNeeds], accumulated: int) -> float:
    return sum(stage.flops / stage.micro_batches * accumulated for stage in stages)


def _peak_location(stage: StepNeeds) -> str:
    module = stage.module or "loss and schedule"
    return f"{'backward of ' if stage.backward else ''}{module} ({stage.operation})"


def _format_message(message: Message) -> str:
    ranks = message.ranks
    shown = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
    over = f"{counted(len(ranks), 'rank')} ({shown})"
    return f"{message.operation:<34}{message.count:>8} times{message.bytes / GIB:>12.3f} GiB   over {over}"


def dry_run_document(dry_run: DryRun) -> JsonObject:
    """Return the dry run as a JSON object of schema ``mca-train/dry-run``, version 1; sizes in bytes."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "implementation": dry_run.implementation,
        "stages": [
            asdict(stage) | {"messages": _messages(stage, dry_run.accumulated)} for stage in dry_run.stages
        ],
    }


def _messages(stage: StepNeeds, accumulated: int) -> list[JsonObject]:
    both = zip(stage.messages, stage.messages_in_step(accumulated), strict=True)
    return [
        {
            "operation": ran.operation,
            "ranks": ran.ranks,
            "count": ran.count,
            "bytes": ran.bytes,
            "count_of_step": whole.count,
            "bytes_of_step": whole.bytes,
        }
        for ran, whole in both
    ]
