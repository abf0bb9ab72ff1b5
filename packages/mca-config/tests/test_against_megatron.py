"""The rank grid and the pipeline plan against Megatron's own functions, without process groups.

Megatron's functions read a rank and sizes from ``parallel_state``; its setters put them there.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import get_mtp_num_layers_to_build
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from mca_config import (
    McaError,
    McaModelConfig,
    ParallelLayout,
    PipelinePlan,
    RankGrid,
    check_layout,
    layout,
    pipeline,
    pipeline_plan,
)
from mca_config.layout import parse_layout

SIZES = (1, 2, 3)
DENSE_AXES = ("tp", "cp", "dp", "pp", "tp-cp", "dp-cp", "tp-pp", "tp-dp-cp", "tp-cp-pp")
EXPERT_AXES = {"etp": "tp", "ep": "ep", "edp": "dp", "pp": "pp", "etp-ep": "tp-ep", "etp-ep-pp": "tp-ep-pp"}


def grid_differences(grid: RankGrid) -> list[str]:
    """The axes whose groups differ from those of Megatron's two rank generators."""
    sizes = grid.layout
    order = "tp-cp-ep-dp-pp"
    dense = parallel_state.RankGenerator(
        tp=sizes.tp, ep=1, dp=grid.data_parallel_size, pp=sizes.pp, cp=sizes.cp, order=order
    )
    expert = parallel_state.RankGenerator(
        tp=sizes.etp, ep=sizes.ep, dp=grid.expert_data_parallel_size, pp=sizes.pp, cp=1, order=order
    )
    pairs = [(axis, dense.get_ranks(axis)) for axis in DENSE_AXES]
    pairs += [(ours, expert.get_ranks(theirs)) for ours, theirs in EXPERT_AXES.items()]
    return [axis for axis, theirs in pairs if [list(group) for group in grid.groups(axis)] != theirs]


def grids() -> Iterator[RankGrid]:
    for tp, cp, pp, ep, etp in itertools.product(SIZES, (1, 2), SIZES, (1, 2, 4), (None, 1, 2)):
        sizes = ParallelLayout(
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
        )
        for replicas in (1, 2, 4):
            try:
                yield RankGrid(sizes, sizes.model_parallel_size * replicas)
            except McaError:
                continue


def test_the_rank_grid_is_megatrons() -> None:
    checked = 0
    for grid in grids():
        assert grid_differences(grid) == [], (grid.layout, grid.world_size)
        checked += 1
    assert checked > 200


def test_a_rank_grid_in_another_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def reversed_place(rank: int, sizes: dict[str, int]) -> dict[str, int]:
        place = {}
        for name, size in reversed(sizes.items()):
            rank, place[name] = divmod(rank, size)
        return place

    monkeypatch.setattr(layout, "_axis_indices", reversed_place)
    assert grid_differences(RankGrid(ParallelLayout(tensor_model_parallel_size=2), 4)) != []


def megatron_config(sizes: ParallelLayout, num_layers: int, mtp: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=num_layers,
        hidden_size=64,
        num_attention_heads=4,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.virtual_pipeline_model_parallel_size,
        pipeline_model_parallel_layout=sizes.pipeline_model_parallel_layout,
        num_layers_in_first_pipeline_stage=sizes.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=sizes.num_layers_in_last_pipeline_stage,
        account_for_embedding_in_pipeline_split=sizes.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=sizes.account_for_loss_in_pipeline_split,
        mtp_num_layers=mtp or None,
    )


Held = dict[tuple[int, int], tuple[list[int], int]]


def megatron_plan(sizes: ParallelLayout, num_layers: int, mtp: int) -> Held:
    """Layers and number of MTP layers of each (pp, vp), by Megatron's functions."""
    config = megatron_config(sizes, num_layers, mtp)
    virtual = config.virtual_pipeline_model_parallel_size
    held: Held = {}
    parallel_state.set_pipeline_model_parallel_world_size(sizes.pp)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual)
    try:
        for pp, vp in itertools.product(range(sizes.pp), range(virtual or 1)):
            parallel_state.set_pipeline_model_parallel_rank(pp)
            stage = None if virtual is None else vp
            count = get_num_layers_to_build(config, stage, pp)
            start = get_transformer_layer_offset(config, stage, pp)
            layers = list(range(start, start + count))
            held[pp, vp] = layers, get_mtp_num_layers_to_build(config, stage, pp)
    finally:
        parallel_state.set_pipeline_model_parallel_world_size(None)
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
        parallel_state.set_pipeline_model_parallel_rank(None)
    return held


def our_plan(plan: PipelinePlan) -> Held:
    return {(chunk.pp, chunk.vp): (list(chunk.layers), len(chunk.mtp_layers)) for chunk in plan}


def is_complete(held: Held, num_layers: int, mtp: int) -> bool:
    layers = sorted(layer for chunk, _ in held.values() for layer in chunk)
    return layers == list(range(num_layers)) and sum(count for _, count in held.values()) == mtp


def even_layouts() -> Iterator[ParallelLayout]:
    for pp, vpp, embedding, loss in itertools.product(
        (1, 2, 3, 4), (None, 2, 3), (False, True), (False, True)
    ):
        if pp > 1 or vpp is None:
            yield ParallelLayout(
                pipeline_model_parallel_size=pp,
                virtual_pipeline_model_parallel_size=vpp,
                account_for_embedding_in_pipeline_split=embedding,
                account_for_loss_in_pipeline_split=loss,
            )


def uneven_layouts() -> Iterator[ParallelLayout]:
    for pp, vpp, first, last in itertools.product((2, 3, 4), (None, 2), (None, 1, 2, 3, 4), (None, 1, 2, 4)):
        yield ParallelLayout(
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
        )


STRINGS = (
    "Et*3|t*4|t*4L",
    "Et*3|t*4|t*4mL",
    "Et|t|t|t|t|tL",
    "Ettt|(tt|)*4,m|L",
    "E|(t|)*10L",
    "E|t*6|t*5|mL",
    "Ett|tt|m|L",
    "Ett|m|tt|L",
    "tt|ttL",
    "Ett|tt",
    "Ett|ttLL",
    "Ett|mmL",
    "Ett|mm|L",
    "Em|ttL",
    "E||ttL",
)


def string_layouts() -> Iterator[ParallelLayout]:
    for text, pp in itertools.product(STRINGS, (1, 2, 3, 4, 6)):
        if len(parse_layout(text)) % pp == 0 and (pp > 1 or "|" not in text):
            yield ParallelLayout(pipeline_model_parallel_size=pp, pipeline_model_parallel_layout=text)


def cases() -> Iterator[tuple[ParallelLayout, int, int]]:
    for sizes in (*even_layouts(), *uneven_layouts()):
        for num_layers in (*range(1, 17), 24):
            yield sizes, num_layers, num_layers % 2
    for sizes in string_layouts():
        for num_layers, mtp in itertools.product((2, 4, 6, 10, 11), (0, 1, 2)):
            yield sizes, num_layers, mtp


def result_of(make: Callable[..., Held], case: tuple[Any, ...], *errors: type[Exception]) -> Held | None:
    try:
        return make(*case)
    except errors:
        return None


def embeds_twice_on_the_first_rank(plan: Held) -> bool:
    """MTP layers behind the first stage of the first rank: megatron-core trains their embedding apart."""
    return any(pp == 0 and vpp > 0 and mtp for (pp, vpp), (_, mtp) in plan.items())


def test_the_pipeline_plan_is_megatrons_wherever_megatrons_is_complete() -> None:
    """Equal where both answer; what we refuse Megatron refuses, or it loses, doubles or wrongly trains a layer."""
    equal = refused = 0
    for sizes, num_layers, mtp in cases():
        case = (sizes, num_layers, mtp)
        ours = result_of(lambda *case: our_plan(pipeline_plan(*case)), case, McaError)
        theirs = result_of(megatron_plan, case, AssertionError, ValueError, ZeroDivisionError)
        if ours is None:
            complete = theirs is not None and is_complete(theirs, num_layers, mtp)
            assert not complete or embeds_twice_on_the_first_rank(theirs), (sizes, num_layers, mtp, theirs)
            refused += 1
        else:
            assert ours == theirs, (sizes, num_layers, mtp)
            equal += 1
    assert equal > 200
    assert refused > 200


@pytest.fixture
def plans_anew() -> Iterator[None]:
    """Plans are kept: none from before, and none that is wrong for those who come after."""
    pipeline_plan.cache_clear()
    yield
    pipeline_plan.cache_clear()


@pytest.mark.usefixtures("plans_anew")
def test_a_plan_without_interleaving_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ParallelLayout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    theirs = megatron_plan(sizes, 8, 0)
    assert our_plan(pipeline_plan(sizes, 8)) == theirs
    good = pipeline._make_chunks

    def blockwise(counts: list[int], mtp: list[int], sizes: ParallelLayout) -> object:
        chunks = [chunk for of_rank in good(counts, mtp, sizes) for chunk in of_rank]
        runs = [chunk.layers for chunk in sorted(chunks, key=lambda chunk: (chunk.vp, chunk.pp))]
        moved = [
            pipeline.PipelineChunk(**{**vars(c), "layers": run}) for c, run in zip(chunks, runs, strict=True)
        ]
        return tuple(tuple(c for c in moved if c.pp == rank) for rank in range(sizes.pp))

    monkeypatch.setattr(pipeline, "_make_chunks", blockwise)
    pipeline_plan.cache_clear()
    assert our_plan(pipeline_plan(sizes, 8)) != theirs


@pytest.mark.usefixtures("plans_anew")
def test_a_plan_that_ignores_the_embeddings_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ParallelLayout(pipeline_model_parallel_size=2, account_for_embedding_in_pipeline_split=True)
    monkeypatch.setattr(pipeline, "_accounted_counts", lambda *_: [3, 2])
    assert our_plan(pipeline_plan(sizes, 5)) != megatron_plan(sizes, 5, 0)


@pytest.mark.parametrize("text", [*STRINGS, "E(t*2|)*2L", "E|*3L", "Et*0|tL", "E(t|m)*2,L"])
def test_layout_strings_unroll_as_megatrons(text: str) -> None:
    letter = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    theirs = PipelineParallelLayerLayout.parse_str_to_list(text)
    assert parse_layout(text) == tuple("".join(letter[kind.name] for kind in stage) for stage in theirs)


def megatron_accepts(heads: int, groups: int, tp: int, experts: int | None, ep: int) -> bool:
    try:
        TransformerConfig(
            num_layers=2,
            hidden_size=240,
            num_attention_heads=heads,
            num_query_groups=groups,
            tensor_model_parallel_size=tp,
            num_moe_experts=experts,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=1,
            moe_ffn_hidden_size=32 if experts else None,
            add_bias_linear=False,
        )
    except (AssertionError, ValueError):
        return False
    return True


def test_the_checks_on_heads_and_experts_are_megatrons() -> None:
    accepted = 0
    for heads, groups, tp in itertools.product((1, 2, 4, 6, 12), (1, 2, 3, 4, 6), (1, 2, 3, 4, 6, 8)):
        for experts, ep in ((None, 1), (None, 2), (8, 2)):
            if heads % groups:
                continue
            model = McaModelConfig.from_fields(
                model_type="any",
                num_layers=2,
                hidden_size=240,
                ffn_hidden_size=240,
                num_attention_heads=heads,
                num_query_groups=groups,
                kv_channels=24,  # which all sizes here divide, as Megatron finds only when it builds the layer
                vocab_size=10,
                max_position_embeddings=16,
                num_moe_experts=experts,
            )
            sizes = ParallelLayout(
                tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=1
            )
            theirs = megatron_accepts(heads, groups, tp, experts, ep)
            assert (check_layout(model, sizes) == []) is theirs, (heads, groups, tp, experts, ep)
            accepted += theirs
    assert accepted > 40
