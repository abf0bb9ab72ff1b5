"""Streams of weights between ranks that are threads: every rank receives its replica's tensors, whole."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import tiny_hf
import torch
from simulated_ranks import SimulatedRanks
from torch import Tensor

from mca_config.errors import McaError
from mca_config.layout import ParallelLayout, RankGrid
from mca_config.model_config import McaModelConfig
from mca_models.megatron.distributed.parallel import RankContext
from mca_models.megatron.state.buckets import Unit, plan_buckets, stacks
from mca_models.megatron.state.stream import WeightSource, stream
from mca_models.templates import config_from_hf, get_family
from mca_models.templates.shapes import full_shape
from mca_models.weights import Param, Stage

SIZES: dict[str, dict[str, int]] = {
    "tp2-dp2": {"tensor_model_parallel_size": 2},
    "tp2-cp2": {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
    "tp3-pp2": {"tensor_model_parallel_size": 3, "pipeline_model_parallel_size": 2},
    "tp2-ep2-etp1": {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
    "ep2-pp2": {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "etp2-ep2": {"expert_tensor_parallel_size": 2, "expert_model_parallel_size": 2},
}
WORLD = {"tp3-pp2": 6, "ep2-pp2": 8, "etp2-ep2": 8}
REPLICA = 1000.0


def config_of(case: str, layout: str) -> McaModelConfig:
    model_type, different = tiny_hf.CASES[case]
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3} if "tp3" in layout else {}
    hf = {**tiny_hf.SIZE, **different, **sizes, "num_hidden_layers": 2, "model_type": model_type}
    return replace(config_from_hf(hf), layout=ParallelLayout(**SIZES[layout]))


def megatron_coordinates(rank: int, world: int, layout: str) -> dict[str, int]:
    """Return the indices of ``rank`` in Megatron's order tp-cp-ep-dp-pp, dense and of experts."""
    sizes = {name.partition("_")[0]: size for name, size in SIZES[layout].items() if "expert_" not in name}
    tp, pp = (sizes.get(name, 1) for name in ("tensor", "pipeline"))
    etp = SIZES[layout].get("expert_tensor_parallel_size", tp)
    ep = SIZES[layout].get("expert_model_parallel_size", 1)
    stage = world // pp
    inside = rank % stage
    return {
        "tp": inside % tp,
        "replica": inside // tp,
        "pp": rank // stage,
        "etp": inside % etp,
        "ep": inside // etp % ep,
        "expert_replica": inside // (etp * ep),
    }


class Model:
    """Full weights of a tiny model, and the shards of each rank; those of each replica differ by `REPLICA`."""

    def __init__(self, case: str, layout: str) -> None:
        self.config, self.layout = config_of(case, layout), layout
        self.world = WORLD.get(layout, 4)
        family = get_family(self.config.model_type)
        self.params = [param for param in family.params(self.config) if not param.alias_of]
        torch.manual_seed(0)
        self.full = {param.mca_name(): torch.randn(full_shape(param, self.config)) for param in self.params}

    def stage(self, param: Param) -> int:
        """Return the pipeline rank of ``param``: two stages of one layer, or one stage."""
        if SIZES[self.layout].get("pipeline_model_parallel_size", 1) == 1:
            return 0
        return {Stage.FIRST: 0, Stage.LAYER: param.layer}.get(param.stage, 1) or 0

    def replica(self, param: Param, rank: int) -> int:
        at = megatron_coordinates(rank, self.world, self.layout)
        return at["replica" if param.expert is None else "expert_replica"]

    def shard(self, param: Param, rank: int) -> Tensor | None:
        """Return the shard of ``param`` that ``rank`` has, with padding rows of the vocabulary."""
        at = megatron_coordinates(rank, self.world, self.layout)
        layout = self.config.layout
        if self.stage(param) != at["pp"]:
            return None
        if param.expert is not None and param.expert // (self.config.num_experts // layout.ep) != at["ep"]:
            return None
        full = self.full[param.mca_name()] + REPLICA * self.replica(param, rank)
        if param.vocab:
            full = torch.cat([full, torch.full((-len(full) % layout.tp, *full.shape[1:]), 7.0)])
        number, count = (at["tp"], layout.tp) if param.expert is None else (at["etp"], layout.etp)
        return param.shard.take(full, number, count)  # type: ignore[no-any-return]

    def source(self, rank: int) -> WeightSource:
        coordinates = RankGrid(self.config.layout, self.world).coordinates(rank)
        by_name = {param.mca_name(): param for param in self.params}
        context = RankContext(self.config.layout, rank, self.world, coordinates)
        return WeightSource(context, self.config, lambda name: self.shard(by_name[name], rank))

    def buckets(self, targets: frozenset[int], max_bytes: int = 1 << 14) -> list[Any]:
        specs = {param.mca_name(): ("F32", full_shape(param, self.config)) for param in self.params}
        units = [Unit(params, targets) for params in stacks(self.params)]
        return plan_buckets(units, specs, self.config, max_bytes)

    def expected(self, rank: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of Hugging Face that ``rank`` receives: from its replica."""
        for group in stacks(self.params):
            parts = [p.from_full(self.full[p.mca_name()] + REPLICA * self.replica(p, rank)) for p in group]
            for number, name in enumerate(group[0].hf_names()):
                entries = [part[number] for part in parts]
                yield name, torch.stack(entries) if group[0].stacked else entries[0]


def received(model: Model, rank: int, targets: frozenset[int]) -> dict[str, Tensor]:
    found = {}
    for filled in stream(model.source(rank), model.buckets(targets)):
        found |= {entry.name: entry.view(filled.buffer).clone() for entry in filled.bucket.entries}
    return found


@pytest.mark.parametrize(
    ("case", "layout", "few"),
    [
        ("llama", "tp2-dp2", False),
        ("llama", "tp2-cp2", True),
        ("llama", "tp3-pp2", False),
        ("qwen3_moe", "tp2-ep2-etp1", False),
        ("qwen3_moe", "ep2-pp2", True),
        ("qwen3_moe", "etp2-ep2", False),
        ("gpt_oss", "ep2-pp2", False),
        ("gpt_oss", "etp2-ep2", True),
    ],
)
def test_each_rank_receives_the_full_tensors_of_its_replica(
    case: str, layout: str, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(case, layout)
    targets = frozenset([0, model.world - 1] if few else range(model.world))
    ranks = SimulatedRanks(model.world, monkeypatch)
    results = ranks.run(lambda rank: received(model, rank, targets))
    for rank, found in enumerate(results):
        if isinstance(found, Exception):
            raise found
        if rank not in targets:
            assert not found
            continue
        expected = dict(model.expected(rank))
        assert found.keys() == expected.keys()
        wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
        assert not wrong, f"rank {rank}: {wrong}"
    assert {target for _, target in ranks.messages} <= targets
    assert all(sender != target for sender, target in ranks.messages)


@pytest.mark.parametrize("leaves", [0, 2])
def test_a_rank_that_stops_is_named_by_all_others(leaves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("llama", "tp2-dp2")
    everyone = frozenset(range(4))
    buckets = model.buckets(everyone)
    assert len(buckets) > 3

    def receive(rank: int) -> int:
        count = 0
        for _ in stream(model.source(rank), buckets):
            count += 1
            if rank == leaves:
                break
        return count

    results = SimulatedRanks(4, monkeypatch).run(receive)
    assert results.pop(leaves) == 1
    assert all(isinstance(result, McaError) for result in results)
    assert all(f"rank {leaves} failed or stopped receiving weights" in str(result) for result in results)


@pytest.mark.parametrize("at", [0, 1])
def test_a_rank_may_stop_at_the_last_bucket(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("llama", "tp2-dp2")
    buckets = model.buckets(frozenset(range(4)))[:2]

    def receive(rank: int) -> int:
        for number, _ in enumerate(stream(model.source(rank), buckets)):
            if number == 1 and rank == at:
                break
        return rank

    assert SimulatedRanks(4, monkeypatch).run(receive) == [0, 1, 2, 3]


def test_no_bucket_is_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("llama", "tp2-dp2")
    assert SimulatedRanks(4, monkeypatch).run(lambda rank: list(stream(model.source(rank), []))) == [[]] * 4
