"""The dry run of every pipeline stage: one rank of each, in processes of their own."""

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
from mca_train.dry_run.step import StepNeeds, step_needs

if TYPE_CHECKING:
    from mca_config.model_config import McaModelConfig
    from mca_train.config.run_config import Settings
    from mca_train.plan.vision_memory import Images
    from mca_train.tasks.task import Task


def needs_of_stages(
    task: "Task",
    settings: "Settings",
    model: "McaModelConfig",
    layout: ParallelLayout,
    world_size: int,
    *,
    ordered: bool = False,
    images: "Images | None" = None,
) -> list[StepNeeds]:
    """What the first rank of each pipeline stage needs for a step.

    Args:
        task: The kind of run.
        settings: The run.
        model: The architecture.
        layout: How the ranks stand.
        world_size: Their number.
        ordered: Whether to put the micro-batches of the first stage in order on all of them, for one timeline.
        images: In each sequence; None: there are none.
    """
    from mca_models.megatron import platform

    platform.prepare()  # here and below: what the processes would each import
    import_module("mca_train.trainer.trainer")
    accumulated = settings.training.gradient_accumulation_steps
    group = settings.training.microbatch_group_size_per_vp_stage
    grid = RankGrid(layout, world_size)
    return _in_processes(
        [
            partial(
                step_needs,
                task,
                settings,
                model,
                rank,
                world_size,
                micro_batches_to_run(accumulated, layout, stage, group),
                images,
                micro_batches_to_run(accumulated, layout, 0, group) if ordered else 0,
            )
            for stage, rank in enumerate(_first_ranks(grid))
        ]
    )


def micro_batches_to_run(
    accumulated: int, layout: ParallelLayout, stage: int, group: int | None = None
) -> int:
    """As many as a stage has at once, and one more; those after them need no more memory.

    With virtual stages the schedule hands out micro-batches in groups, of the pipeline's size unless a ``group`` is
    set, and takes whole ones: at least two of the pipeline's size.
    """
    if layout.vpp == 1:
        return min(accumulated, layout.pp - stage + 1)
    whole = group or layout.pp
    return min(accumulated, -(-2 * layout.pp // whole) * whole)


def _in_processes(work: Sequence[Callable[[], StepNeeds]]) -> list[StepNeeds]:
    """The results of ``work``, each done in a fork of this thread, as many at once as there are cores."""
    waiting, running, found = deque(enumerate(work)), dict[Connection, int](), dict[int, StepNeeds]()
    try:
        while waiting or running:
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                number, task = waiting.popleft()
                running[_started(task)] = number
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                found[running.pop(connection)] = _received(connection)
    finally:
        for process in multiprocessing.active_children():
            process.kill()
    return [found[number] for number in range(len(work))]


def _started(task: Callable[[], StepNeeds]) -> Connection:
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe(duplex=False)
    context.Process(target=_answer, args=(task, its), daemon=True).start()
    its.close()
    return mine


def _answer(task: Callable[[], StepNeeds], connection: Connection) -> None:
    # a fork has its parent's pool made anew when it is first asked for; autograd's threads would ask at once, and abort
    torch.set_num_threads(torch.get_num_threads())
    try:
        result: StepNeeds | BaseException = task()
    except Exception as error:  # reported by the parent, once
        result = _sendable(error)
    connection.send(result)


def _sendable(error: Exception) -> Exception:
    """``error``, or what it says where it refers to something that cannot leave the process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return McaError(f"{type(error).__name__}: {error}")
    return error


def _received(connection: Connection) -> StepNeeds:
    try:
        result = connection.recv()
    except EOFError:
        raise McaError("a process of the dry run was killed, perhaps because memory ran out") from None
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
