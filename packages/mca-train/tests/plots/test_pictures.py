"""The pictures of a plan: all are written, in both forms, and say what they show at 8 stages."""

from pathlib import Path

import pytest

from mca_config.errors import UsageError
from mca_config.layout import ParallelLayout, RankGrid
from mca_config.pipeline import pipeline_plan
from mca_train.dry_run.stages import DryRun
from mca_train.dry_run.step import StepNeeds
from mca_train.dry_run.tracker import Message
from mca_train.plan.schedule import Order
from mca_train.plots import prepare_folder
from mca_train.plots.figures import bubble_fraction, draw_all, group_name, run_timeline

GIB = 1024**3
STAGES, MICRO_BATCHES = 8, 8
LAYOUT = ParallelLayout(tensor_model_parallel_size=2, pipeline_model_parallel_size=STAGES)
GRID = RankGrid(LAYOUT, 4 * STAGES)


def stage(number: int) -> StepNeeds:
    rank = number * GRID.world_size // STAGES
    parts = {"weights": 6 * GIB, "gradients": 12 * GIB, "optimizer": 5 * GIB, "reference": 0}
    parts |= {"activations": (STAGES - number) * GIB, "temporaries": GIB // 2}
    return StepNeeds(
        rank=rank,
        stage=number,
        micro_batches=MICRO_BATCHES,
        peak=sum(parts.values()),
        operation="aten.mm",
        module="decoder.layers.0.mlp",
        backward=True,
        curve=tuple(20 * GIB + step * GIB // 100 for step in range(100)),
        flops=10**12,
        messages=(
            Message("_allgather_base", GRID.rank_group("tp", rank), 40, 8 * GIB, 2.5, GIB / 2),
            Message("allreduce", GRID.rank_group("dp", rank), 4, 5 << 10),
        ),
        passes=(),
        order=tuple(Order(STAGES, 1, MICRO_BATCHES).passes(number)),
        synchronisations=0,
        **parts,
    )


def test_every_picture_is_written_and_says_what_it_shows(tmp_path: Path) -> None:
    stages = [stage(number) for number in range(STAGES)]
    ran = DryRun(stages=stages, accumulated=64, implementation="local", note="measured elsewhere")
    paths = draw_all(tmp_path, ran, pipeline_plan(LAYOUT, 2 * STAGES), GRID, 75.1)
    assert sorted(path.name for path in paths) == sorted(
        f"{name}.{kind}"
        for name in ("schedule", "memory", "memory_over_step", "layers", "messages")
        for kind in ("svg", "png")
    )
    for path in paths:
        head = path.read_bytes()[:200]
        assert head.startswith(b"\x89PNG") if path.suffix == ".png" else b"<?xml" in head
    schedule = (tmp_path / "schedule.svg").read_text()
    assert "stage 7" in schedule
    assert "10% waiting in a step of 64 micro-batches, 47% in the 8 shown" in schedule  # 7 of 71, of 15
    for name in ("memory", "memory_over_step"):
        assert "measured elsewhere" in (tmp_path / f"{name}.svg").read_text()
    assert "75.1 usable" in (tmp_path / "memory.svg").read_text()
    assert "14-15 head" in (tmp_path / "layers.svg").read_text()
    messages = (tmp_path / "messages.svg").read_text()
    assert "tp (2 ranks)" in messages
    assert "in a step of 64 micro-batches, 8 of which were run" in messages
    assert "36 GiB, 180 times" in messages and "5 KiB, 4 times" in messages


def test_passes_that_take_equally_long_wait_as_the_formula_of_the_bubble_says() -> None:
    ran = run_timeline([stage(number) for number in range(STAGES)], 1)
    end = max(run.end for run in ran)
    busy = sum(run.end - run.start for run in ran) / STAGES
    assert 1 - busy / end == pytest.approx(LAYOUT.bubble(MICRO_BATCHES))
    for micro_batches in (MICRO_BATCHES, 128):
        assert bubble_fraction(ran, STAGES, micro_batches) == pytest.approx(LAYOUT.bubble(micro_batches))


def test_groups_are_named_by_their_axis() -> None:
    for axis in ("tp", "dp", "pp"):
        message = Message("allreduce", GRID.rank_group(axis, 0), 1, 1)
        assert group_name(message, 0, GRID).startswith(f"{axis} (")
    assert group_name(Message("allreduce", tuple(range(32)), 1, 1), 0, GRID) == "all 32 ranks"


def test_a_directory_that_cannot_be_written_is_told_before_anything_is_computed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot be written .*; name another directory"):
        prepare_folder(tmp_path / "file" / "pictures")
    prepare_folder(tmp_path / "new" / "pictures")
    assert list((tmp_path / "new" / "pictures").iterdir()) == []
