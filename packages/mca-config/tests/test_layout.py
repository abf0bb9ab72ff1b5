"""The rank grid: its own laws. That it is Megatron's is in test_against_megatron."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mca_config import McaError, ParallelLayout, RankGrid

SIZES = st.sampled_from([1, 2, 3, 4])


@st.composite
def grids(draw: st.DrawFn) -> RankGrid:
    layout = ParallelLayout(
        tensor_model_parallel_size=draw(SIZES),
        context_parallel_size=draw(SIZES),
        pipeline_model_parallel_size=draw(SIZES),
        expert_model_parallel_size=draw(SIZES),
        expert_tensor_parallel_size=draw(st.one_of(st.none(), SIZES)),
    )
    unit = math.lcm(layout.model_parallel_size, layout.expert_model_size)
    return RankGrid(layout, unit * draw(st.sampled_from([1, 2, 3])))


@given(grids())
def test_coordinates_and_rank_are_inverse(grid: RankGrid) -> None:
    step = max(1, grid.world_size // 50)
    for rank in range(0, grid.world_size, step):
        at = grid.coordinates(rank)
        assert grid.rank(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) == rank
        assert grid.expert_rank(etp=at.etp, ep=at.ep, edp=at.edp, pp=at.pp) == rank


@given(grids(), st.sampled_from(["tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "etp", "ep", "edp", "etp-ep-pp"]))
def test_groups_partition_the_ranks(grid: RankGrid, axis: str) -> None:
    groups = grid.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    assert len({len(group) for group in groups}) == 1
    for group in groups[:3]:
        fixed = set("tp cp dp pp".split() if axis[0] != "e" else "etp ep edp pp".split()) - set(
            axis.split("-")
        )
        for name in fixed:
            assert len({getattr(grid.coordinates(rank), name) for rank in group}) == 1


@given(grids())
def test_data_parallel_sizes_follow_megatrons_definitions(grid: RankGrid) -> None:
    layout = grid.layout
    assert grid.data_parallel_size == grid.world_size // (layout.tp * layout.pp * layout.cp)
    assert grid.expert_data_parallel_size == grid.world_size // (layout.etp * layout.ep * layout.pp)


def test_group_of_holds_the_rank() -> None:
    grid = RankGrid(ParallelLayout(tensor_model_parallel_size=2), 6)
    assert grid.rank_group("tp", 3) == (2, 3)
    assert grid.rank_group("dp", 3) == (1, 3, 5)


@pytest.mark.parametrize(
    ("sizes", "world", "words"),
    [
        (
            {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
            6,
            ["tensor_model_parallel_size 2", "start 4 or 8 ("],
        ),
        ({"expert_model_parallel_size": 4}, 6, ["expert_model_parallel_size 4", "start 4 or 8 ("]),
        ({}, 0, ["0 ranks cannot be divided", "start 1 ("]),
        ({"tensor_model_parallel_size": 2}, 1, ["1 rank cannot be divided", "start 2 ("]),
    ],
)
def test_a_world_that_does_not_divide_names_the_sizes(
    sizes: dict[str, int], world: int, words: list[str]
) -> None:
    with pytest.raises(McaError) as error:
        RankGrid(ParallelLayout(**sizes), world)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("bad", [0, -1, True, "2", 1.5])
def test_sizes_are_counts(bad: object) -> None:
    with pytest.raises(McaError, match="tensor_model_parallel_size must be an integer of at least 1"):
        ParallelLayout(tensor_model_parallel_size=bad)


def test_a_rank_or_axis_outside_is_an_error() -> None:
    grid = RankGrid(ParallelLayout(), 2)
    with pytest.raises(McaError, match="rank 2"):
        grid.coordinates(2)
    with pytest.raises(McaError, match="dp 2"):
        grid.rank(dp=2)
    with pytest.raises(McaError, match="axis 'tp-ep'"):
        grid.groups("tp-ep")


def test_a_virtual_size_of_one_is_none() -> None:
    one = ParallelLayout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=1)
    assert one == ParallelLayout(pipeline_model_parallel_size=2)
    assert one.vpp == 1


def test_a_virtual_size_needs_a_pipeline() -> None:
    with pytest.raises(
        McaError, match="virtual_pipeline_model_parallel_size 2 needs pipeline_model_parallel_size"
    ):
        ParallelLayout(virtual_pipeline_model_parallel_size=2)


def test_a_layout_string_fixes_the_virtual_size() -> None:
    layout = ParallelLayout(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|t|t|tL")
    assert layout.vpp == 2
    with pytest.raises(McaError, match="remove virtual_pipeline_model_parallel_size 3"):
        ParallelLayout(
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=3,
            pipeline_model_parallel_layout="Et|t|t|tL",
        )
    with pytest.raises(McaError, match="has 3 stages"):
        ParallelLayout(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|t|tL")


def test_only_one_way_of_splitting() -> None:
    with pytest.raises(McaError, match="remove num_layers_in_first_pipeline_stage"):
        ParallelLayout(
            pipeline_model_parallel_size=2,
            pipeline_model_parallel_layout="Et|tL",
            num_layers_in_first_pipeline_stage=1,
        )
    with pytest.raises(McaError, match="cannot be combined with account_for_loss_in_pipeline_split"):
        ParallelLayout(
            pipeline_model_parallel_size=2,
            num_layers_in_first_pipeline_stage=1,
            account_for_loss_in_pipeline_split=True,
        )
    with pytest.raises(McaError, match="needs pipeline_model_parallel_size of at least 2"):
        ParallelLayout(num_layers_in_last_pipeline_stage=1)


def test_the_expert_tensor_size_follows_the_tensor_size() -> None:
    assert ParallelLayout(tensor_model_parallel_size=4).etp == 4
    assert ParallelLayout(tensor_model_parallel_size=4, expert_tensor_parallel_size=1).etp == 1


def test_a_layout_prints_short() -> None:
    layout = ParallelLayout(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, expert_model_parallel_size=4
    )
    assert str(layout) == "tp 2 pp 2 ep 4 etp 2"


def test_all_axes_of_a_grid_are_one_group_of_all_ranks() -> None:
    layout = ParallelLayout(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, expert_model_parallel_size=2
    )
    grid = RankGrid(layout, 8)
    for axes in ("tp-cp-dp-pp", "etp-ep-edp-pp", "dp-pp-tp-cp"):
        assert grid.groups(axes) == (tuple(range(8)),)
    with pytest.raises(McaError, match="axis 'tp-ep': expected names of"):
        grid.groups("tp-ep")


def test_a_layout_names_its_virtual_stages_and_context_ranks_apart() -> None:
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3}
    virtual = ParallelLayout(**sizes, virtual_pipeline_model_parallel_size=5, context_parallel_size=4)
    assert str(virtual) == "tp 2 pp 3 vpp 5 cp 4"
    smallest = ParallelLayout(**sizes, virtual_pipeline_model_parallel_size=2, context_parallel_size=2)
    assert str(smallest) == "tp 2 pp 3 vpp 2 cp 2"
    assert str(ParallelLayout(**sizes)) == "tp 2 pp 3"


@pytest.mark.parametrize(
    ("pp", "vpp", "micro_batches", "bubble"),
    [(1, 1, 4, 0), (4, 1, 6, 3 / 9), (4, 2, 6, 3 / 15), (2, 4, 1, 1 / 5)],
)
def test_ranks_wait_for_the_first_and_last_micro_batch(
    pp: int, vpp: int, micro_batches: int, bubble: float
) -> None:
    layout = ParallelLayout(pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp)
    assert layout.bubble(micro_batches) == pytest.approx(bubble)


def test_a_size_has_at_most_16_bits() -> None:
    assert ParallelLayout(context_parallel_size=1 << 16).cp == 65536
    with pytest.raises(
        McaError, match="context_parallel_size must be at most 65536, not a number of 5 digits"
    ):
        ParallelLayout(context_parallel_size=65537)
    for name in ("num_layers_in_first_pipeline_stage", "virtual_pipeline_model_parallel_size"):
        with pytest.raises(McaError, match=f"{name} must be an integer of at least 1, not 0"):
            ParallelLayout(pipeline_model_parallel_size=2, **{name: 0})
    with pytest.raises(
        McaError, match="pipeline_model_parallel_size must be an integer of at least 1, not None"
    ):
        ParallelLayout(pipeline_model_parallel_size=None)


def test_ranks_below_0_and_beyond_an_axis_are_named() -> None:
    layout = ParallelLayout(
        tensor_model_parallel_size=2, expert_tensor_parallel_size=1, expert_model_parallel_size=3
    )
    grid = RankGrid(layout, 6)
    with pytest.raises(McaError, match="rank -1 is outside 0 to 5, of 6 ranks"):
        grid.coordinates(-1)
    with pytest.raises(McaError, match="tp -1 is outside 0 to 1, the ranks of that axis"):
        grid.rank(tp=-1)
    with pytest.raises(McaError, match="ep 3 is outside 0 to 2, the ranks of that axis"):
        grid.expert_rank(ep=3)
    assert str(layout) == "tp 2 pp 1 ep 3 etp 1"
    assert (
        str(ParallelLayout(tensor_model_parallel_size=2, expert_tensor_parallel_size=1))
        == "tp 2 pp 1 ep 1 etp 1"
    )
    text = ParallelLayout(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|tL")
    assert str(text) == "tp 1 pp 2 layout Et|tL"
