"""Dry runs of all pipeline stages, one rank of each, in separate processes."""

import multiprocessing
import os
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

import torch

from mca_config.errors import McaError
from mca_config.layout import ParallelLayout, RankGrid
from mca_models.megatron import platform
from mca_train.dry_run.step import StepNeeds, measure_step

if TYPE_CHECKING:
    from mca_config.model_config import McaModelConfig
    from mca_train.config.run_config import Settings
    from mca_train.plan.audio_memory import PlannedMedia
    from mca_train.tasks.task import Task


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
