"""Layers of pipeline stages: laws that hold for every plan, and small examples."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mca_config import McaError, ParallelLayout, PipelinePlan, pipeline, pipeline_plan
from mca_config.layout import parse_layout


def layers_by_chunk(plan: PipelinePlan) -> list[list[tuple[int, ...]]]:
    return [[chunk.layers for chunk in of_rank] for of_rank in plan.chunks]


def pp(size: int, **more: object) -> ParallelLayout:
    return ParallelLayout(pipeline_model_parallel_size=size, **more)


def test_even() -> None:
    assert layers_by_chunk(pipeline_plan(pp(2), 4)) == [[(0, 1)], [(2, 3)]]


def test_virtual_stages_interleave() -> None:
    plan = pipeline_plan(pp(2, virtual_pipeline_model_parallel_size=2), 8)
    assert layers_by_chunk(plan) == [[(0, 1), (4, 5)], [(2, 3), (6, 7)]]
    assert plan.rank_layers(1) == (2, 3, 6, 7)


def test_uneven_first_and_last() -> None:
    layout = pp(3, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=2)
    assert layers_by_chunk(pipeline_plan(layout, 6)) == [[(0,)], [(1, 2, 3)], [(4, 5)]]


def test_embedding_and_loss_take_a_layers_place() -> None:
    layout = pp(2, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)
    assert layers_by_chunk(pipeline_plan(layout, 4)) == [[(0, 1)], [(2, 3)]]
    layout = pp(2, account_for_embedding_in_pipeline_split=True)
    assert layers_by_chunk(pipeline_plan(layout, 5)) == [[(0, 1)], [(2, 3, 4)]]


def test_a_layout_string() -> None:
    layout = pp(3, pipeline_model_parallel_layout="Et*3|t*4|t*4L")
    assert layers_by_chunk(pipeline_plan(layout, 11)) == [[(0, 1, 2)], [(3, 4, 5, 6)], [(7, 8, 9, 10)]]


def test_a_layout_string_with_virtual_stages_and_mtp() -> None:
    layout = pp(2, pipeline_model_parallel_layout="E|tt|t|mL")
    plan = pipeline_plan(layout, 3, mtp_num_layers=1)
    assert layers_by_chunk(plan) == [[(), (2,)], [(0, 1), ()]]
    assert plan.mtp_chunk(0) is plan.last


def test_mtp_stands_with_the_loss_unless_the_string_says_otherwise() -> None:
    plan = pipeline_plan(pp(2, virtual_pipeline_model_parallel_size=2), 4, mtp_num_layers=2)
    assert plan.mtp_chunk(1) is plan.last
    alone = pipeline_plan(pp(3, pipeline_model_parallel_layout="Ett|mm|L"), 2, mtp_num_layers=2)
    assert alone.mtp_chunk(0).pp == 1
    assert alone.mtp_chunk(0).mtp_layers == (0, 1)


def test_prediction_layers_have_an_embedding_and_stand_behind_the_final_norm() -> None:
    plan = pipeline_plan(pp(4, pipeline_model_parallel_layout="Et|t|m|L"), 2, mtp_num_layers=1)
    assert (plan.final_norm.pp, plan.embedding_ranks) == (1, (0, 2))
    without = pipeline_plan(pp(3, pipeline_model_parallel_layout="Et|t|L"), 2)
    assert (without.final_norm.pp, without.embedding_ranks) == (2, (0,))


@st.composite
def plans(draw: st.DrawFn) -> tuple[PipelinePlan, int]:
    size, virtual = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    layers = draw(st.integers(1, 40))
    kind = draw(st.sampled_from(["even", "uneven", "account", "string"]))
    more: dict[str, object] = {"virtual_pipeline_model_parallel_size": virtual}
    if kind == "uneven":
        more["num_layers_in_first_pipeline_stage"] = draw(st.one_of(st.none(), st.integers(1, 12)))
        more["num_layers_in_last_pipeline_stage"] = draw(st.one_of(st.none(), st.integers(1, 12)))
    if kind == "account":
        more["account_for_embedding_in_pipeline_split"] = draw(st.booleans())
        more["account_for_loss_in_pipeline_split"] = draw(st.booleans())
    if kind == "string":
        cuts = sorted(
            draw(st.lists(st.integers(0, layers), min_size=size * virtual - 1, max_size=size * virtual - 1))
        )
        runs = [after - before for before, after in zip([0, *cuts], [*cuts, layers], strict=True)]
        more["pipeline_model_parallel_layout"] = "E" + "|".join(f"t*{run}" for run in runs) + "L"
    try:
        return pipeline_plan(pp(size, **more), layers), layers
    except McaError:
        assume(False)
        raise


@given(plans())
def test_every_layer_stands_on_exactly_one_chunk_in_order(case: tuple[PipelinePlan, int]) -> None:
    plan, layers = case
    assert [layer for chunk in plan for layer in chunk.layers] == list(range(layers))
    for layer in range(layers):
        chunk = plan.layer_chunk(layer)
        assert layer in plan.chunks[chunk.pp][chunk.vp].layers


@given(plans())
def test_one_chunk_begins_and_one_ends_the_model(case: tuple[PipelinePlan, int]) -> None:
    plan, _ = case
    assert [chunk for chunk in plan if chunk.has_embedding] == [plan.first]
    assert [chunk for chunk in plan if chunk.has_loss] == [plan.last]


@pytest.mark.parametrize(
    ("layout", "layers", "words"),
    [
        (
            pp(4),
            30,
            ["num_layers 30", "pipeline_model_parallel_size 4", "num_layers_in_first_pipeline_stage"],
        ),
        (pp(2, virtual_pipeline_model_parallel_size=2), 6, ["virtual_pipeline_model_parallel_size 2"]),
        (pp(2, account_for_loss_in_pipeline_split=True), 4, ["with embedding or loss counted: 5"]),
        (
            pp(2, num_layers_in_first_pipeline_stage=3, num_layers_in_last_pipeline_stage=4),
            8,
            ["leaves 1 layer for 0 further pipeline stages", "num_layers_in_first_pipeline_stage 3"],
        ),
        (pp(4, num_layers_in_first_pipeline_stage=3), 10, ["leaves 7 layers for 3 further"]),
        (
            pp(2, virtual_pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=3),
            7,
            ["3 layers", "virtual_pipeline_model_parallel_size 2"],
        ),
        (pp(2, pipeline_model_parallel_layout="Ett|ttL"), 5, ["has 4 decoder layers", "the model has 5"]),
        (pp(2, pipeline_model_parallel_layout="tt|ttL"), 4, ["must begin with its one E"]),
        (pp(2, pipeline_model_parallel_layout="Ett|tt"), 4, ["must end with its one L"]),
        (pp(2, pipeline_model_parallel_layout="EttL|ttL"), 4, ["must end with its one L", "has 2"]),
        (pp(2, pipeline_model_parallel_layout="Ettm|ttL"), 4, ["(m), the model has 0"]),
    ],
)
def test_what_does_not_divide_names_the_flag(layout: ParallelLayout, layers: int, words: list[str]) -> None:
    with pytest.raises(McaError) as error:
        pipeline_plan(layout, layers)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("text", "size", "words"),
    [
        ("Etm|tL", 2, "move m behind the last t"),
        ("Ett|m|mL", 3, "m is in 2 stages"),
        ("Ett|m|m|L", 2, "m is in 2 stages"),
        ("Ett|mm||L", 2, "last virtual stage"),
        ("Et|t|m|L", 2, "a second embedding"),
    ],
)
def test_misplaced_mtp_is_an_error(text: str, size: int, words: str) -> None:
    with pytest.raises(McaError, match=words):
        pipeline_plan(pp(size, pipeline_model_parallel_layout=text), 2, mtp_num_layers=text.count("m"))


def test_layers_outside_the_model_are_errors() -> None:
    plan = pipeline_plan(pp(2), 4)
    with pytest.raises(McaError, match="layer 4"):
        plan.layer_chunk(4)
    with pytest.raises(McaError, match="layer 0 is outside"):
        plan.mtp_chunk(0)
    with pytest.raises(McaError, match="num_layers must be at least 1"):
        pipeline_plan(pp(1), 0)


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("EttL", ("EttL",)),
        ("Et*3|t*4|t*4L", ("Ettt", "tttt", "ttttL")),
        ("Ettt|(tt|)*3,m|L", ("Ettt", "tt", "tt", "tt", "m", "L")),
        ("E|(t|tt)*2|L", ("E", "t", "ttt", "tt", "L")),
        ("E(t*2|)*2L", ("Ett", "tt", "L")),
        ("E|*3L", ("E", "", "", "L")),
        ("Et*0|tL", ("E", "tL")),
    ],
)
def test_layout_strings_unroll(text: str, stages: tuple[str, ...]) -> None:
    assert parse_layout(text) == stages


@pytest.mark.parametrize(
    "text", ["Ex|L", "E t|L", "Et*|L", "E(t)L", "E((t)*2)*2L", "Et*2*3L", "E()*3L", "et|L", "*3tL"]
)
def test_what_is_no_layout_string_is_an_error(text: str) -> None:
    with pytest.raises(McaError, match="cannot be read at"):
        parse_layout(text)


@pytest.mark.parametrize(
    ("stages", "size", "problem"),
    [
        (("Et", "tL"), 2, None),
        (("Et", "tmmL"), 2, None),
        (("Et", "tm", "mL"), 3, "m is in 2 stages"),
        (("Etm", "tm", "mL"), 3, "m is in 3 stages"),
        (("Et", "tm", "L"), 3, None),
        (("EtmL",), 1, None),
        (("Et", "t", "m", "L"), 2, "m is on the first pipeline rank"),
        (("Et", "t", "t", "mL"), 2, None),
        (("Et", "m", "t", "L"), 2, "m must be in the last virtual stage"),
        (("Em", "L"), 2, None),
    ],
)
def test_stages_that_may_hold_the_mtp_layers(stages: tuple[str, ...], size: int, problem: str | None) -> None:
    found = pipeline._mtp_problem(stages, size)
    assert found is None if problem is None else found is not None and found.startswith(problem)


def test_virtual_stages_have_columns_with_names() -> None:
    layout = ParallelLayout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    header, first, second = str(pipeline_plan(layout, 4)).splitlines()
    assert header.split() == ["vp", "0", "vp", "1"]
    assert first.startswith("pp 0") and second.startswith("pp 1")
    assert len(str(pipeline_plan(ParallelLayout(), 4)).splitlines()) == 1


def test_a_layout_string_has_at_most_100000_letters() -> None:
    assert parse_layout("Et*99998L") == ("E" + "t" * 99998 + "L",)
    assert len(parse_layout("(t*9|)*9999t*10")) == 10000
    for text in ("Et*99999L", "E(t*99|)*1000L", "t*100000", "(t|)*100000"):
        with pytest.raises(McaError, match="more than 100000 layers and stages"):
            parse_layout(text)


def with_requested_layers(
    size: int, first: int | None, last: int | None, virtual: int | None
) -> ParallelLayout:
    return pp(
        size,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        virtual_pipeline_model_parallel_size=virtual,
    )


@pytest.mark.parametrize(
    ("first", "last", "layers", "size", "virtual", "chunks"),
    [
        (1, 1, 2, 2, None, [[1], [1]]),
        (2, None, 6, 2, 2, [[1, 1], [2, 2]]),
        (None, 2, 6, 2, 2, [[2, 2], [1, 1]]),
        (2, 4, 14, 3, 2, [[1, 1], [4, 4], [2, 2]]),
        (2, None, 8, 3, None, [[2], [3], [3]]),
    ],
)
def test_ranks_between_those_with_requested_layers_share_the_others(
    first: int | None, last: int | None, layers: int, size: int, virtual: int | None, chunks: list[list[int]]
) -> None:
    layout = with_requested_layers(size, first, last, virtual)
    found = layers_by_chunk(pipeline_plan(layout, layers))
    assert [[len(chunk) for chunk in of_rank] for of_rank in found] == chunks


@pytest.mark.parametrize(
    ("first", "last", "layers", "size", "virtual", "words"),
    [
        (
            3,
            4,
            6,
            2,
            None,
            "stage 3, num_layers_in_last_pipeline_stage 4 leaves -1 layers for 0 further pipeline stages",
        ),
        (1, 1, 2, 3, None, "leaves 0 layers for 1 further pipeline stage, which"),
        (
            None,
            4,
            4,
            2,
            None,
            "num_layers 4 with num_layers_in_last_pipeline_stage 4 leaves 0 layers for 1 further",
        ),
        (2, 2, 4, 2, 2, "together leave no stage between them at pipeline_model_parallel_size 2"),
        (4, None, 7, 2, 2, r"a pipeline rank with 3 layers \(num_layers_in_first_pipeline_stage 4\) cannot"),
    ],
)
def test_requested_layers_that_leave_no_even_share_are_refused(
    first: int | None, last: int | None, layers: int, size: int, virtual: int | None, words: str
) -> None:
    layout = with_requested_layers(size, first, last, virtual)
    with pytest.raises(McaError, match=words):
        pipeline_plan(layout, layers)


@pytest.mark.parametrize(
    ("layers", "ends", "mtp", "words"),
    [
        ((3,), (True, False), 0, "embedding, layer 3"),
        ((3, 4), (False, False), 0, "layers 3-4"),
        ((), (False, True), 2, "mtp 0, mtp 1, loss"),
        ((), (False, False), 0, "(empty)"),
    ],
)
def test_a_chunk_names_what_it_has(
    layers: tuple[int, ...], ends: tuple[bool, bool], mtp: int, words: str
) -> None:
    chunk = pipeline.PipelineChunk(
        pp=0, vp=0, layers=layers, has_embedding=ends[0], has_loss=ends[1], mtp_layers=tuple(range(mtp))
    )
    assert str(chunk) == words


@pytest.mark.parametrize(
    ("flat", "problem"),
    [
        ("EtmL", None),
        ("tmL", "must begin with its one E (embedding), has 0"),
        ("EEtmL", "must begin with its one E (embedding), has 2"),
        ("Etm", "must end with its one L (loss), has 0"),
        ("EtmLL", "must end with its one L (loss), has 2"),
        ("EttmL", "has 2 decoder layers (t), the model has 1; change the counts of t"),
        ("EtL", "has 0 MTP layers (m), the model has 1 (mtp_num_layers); change the count of m"),
        ("EmtL", "decoder layers (t) come after an MTP layer (m); move m behind the last t"),
    ],
)
def test_the_letters_of_a_layout_string_are_those_of_the_model(flat: str, problem: str | None) -> None:
    assert pipeline._string_problem(flat, 1, 1) == problem
