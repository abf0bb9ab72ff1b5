"""The order of passes is that of Megatron's own schedules."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mca_train.plan.chunks import PassMemory
from mca_train.plan.memory import find_peak
from mca_train.plan.schedule import Order


@pytest.mark.parametrize(
    ("pp", "vpp", "count"), [(1, 1, 3), (4, 1, 8), (4, 1, 2), (2, 2, 4), (4, 3, 8), (4, 2, 4)]
)
def test_it_is_megatrons(pp: int, vpp: int, count: int) -> None:
    from mca_models.megatron import platform

    platform.prepare()  # before Megatron is imported
    from megatron.core.pipeline_parallel import schedules

    table = schedules.get_schedule_table(count, vpp, pp if vpp > 1 else count)
    for rank in range(pp):
        passes = list(Order(pp, vpp, count).passes(rank))
        assert [(p.micro_batch, p.chunk) for p in passes if p.forward] == table
        assert [(p.micro_batch, vpp - 1 - p.chunk) for p in passes if not p.forward] == table
        group: Any = SimpleNamespace(size=lambda: pp, rank=lambda rank=rank: rank)
        of_rank: Any = SimpleNamespace(
            pp_group=group, virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None
        )
        _, _, ahead, _ = schedules.get_pp_rank_microbatches(count, vpp, pp, p2p_communicator=of_rank)
        first = [p.forward for p in passes].index(False)
        assert first == min(ahead + 1, count * vpp)


@pytest.mark.parametrize(
    ("vpp", "group", "count"),
    [(1, None, 40), (1, None, 2), (2, None, 40), (2, 16, 64), (2, 16, 40), (3, 5, 40)],
)
def test_a_period_shows_as_many_passes_in_flight_as_the_whole_step(vpp: int, group: int, count: int) -> None:
    chunks = [PassMemory(kept=1.0, forward=0.0, backward=0.0)] * vpp
    whole = Order(2, vpp, count, group)
    few = replace(whole, micro_batches=min(count, whole.filling))
    for rank in range(whole.pp):
        assert find_peak(chunks, few, rank) == find_peak(chunks, whole, rank)
    if (vpp, group) == (2, 16):
        assert find_peak(chunks, few, 0).in_flight == (2 - 1) * 2 + (2 - 1) * 16 + 1
