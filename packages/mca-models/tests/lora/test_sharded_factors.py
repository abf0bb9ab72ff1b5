"""Factors on shards of fused weights, and factors of stacked experts: products against those of full matrices."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_hf
import torch

from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_models.lora import Adapter, AdapterConfig, rules_for_training
from mca_models.lora.merge import MergedSource
from mca_models.lora.peft_directory import PeftReader, PeftTensors, peft_shapes, per_expert_tensors
from mca_models.lora.rules import LoraFactors, factors_by_weight
from mca_models.megatron.peft.attach import LinearGroups, _lora
from mca_models.megatron.peft.exchange import whole_adapter
from mca_models.templates import config_from_hf
from mca_models.templates.shapes import full_shape
from mca_models.weights import Param

RANK, ALPHA = 2, 6
STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@dataclass(frozen=True)
class Group:
    """A process group of one simulated rank."""

    number: int
    count: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.count


def config_of(case: str, tp: int = 1, **sizes: Any) -> McaModelConfig:
    model_type, different = tiny_hf.CASES[case]
    config = config_from_hf({**tiny_hf.SIZE, **different, **sizes, "model_type": model_type})
    return replace(
        config, layout=ParallelLayout(tensor_model_parallel_size=tp, expert_tensor_parallel_size=tp)
    )


def random_adapter(config: McaModelConfig, **settings: Any) -> Adapter:
    """Return an adapter whose tensors are random, by canonical name."""
    document = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, **settings}
    adapter_config = AdapterConfig.from_dict(document)
    rules = rules_for_training(config, adapter_config)
    shapes = peft_shapes(Adapter(config, adapter_config, rules, lambda param: None))  # type: ignore[arg-type,return-value]
    generator = np.random.default_rng(3)
    tensors = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    reader = PeftReader(tensors.__getitem__, config.num_experts or 1)
    return Adapter(config, adapter_config, rules, reader.read)


def full_product(adapter: Adapter, pairs: Sequence[LoraFactors]) -> np.ndarray[Any, Any]:
    """Return what ``pairs`` add to the full fused weight: zero where a Hugging Face module has no adapter."""
    base = pairs[0].target.base
    shapes = [each.shape for each in base.from_full(np.empty(full_shape(base, adapter.model)))]
    changes = [np.zeros(shape, np.float32) for shape in shapes]
    for pair in pairs:
        a, b = (param.from_full(adapter.read(param))[0] for param in (pair.a, pair.b))
        changes[pair.target.part] = pair.scale * b @ a
    return base.layout.pack(base.hf_layout.unpack(changes))[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("case", "modules"),
    [
        ("llama", ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "o_proj", "down_proj"]),
        ("llama", ["k_proj", "up_proj"]),
        ("llama", ["q_proj", "v_proj", "gate_proj"]),
        ("qwen3_next", ["q_proj", "v_proj", "in_proj_qkvz", "in_proj_ba", "out_proj", "gate"]),
        ("qwen2_moe", ["up_proj", "gate_proj", "down_proj", "shared_expert_gate"]),
    ],
)
def test_the_product_on_each_rank_is_its_shard_of_the_full_product(
    case: str, modules: list[str], tp: int
) -> None:
    config = config_of(case, tp)
    adapter = random_adapter(config, target_modules=modules, rank_pattern={modules[1]: 3})
    seen = set()
    for name, pairs in factors_by_weight(adapter.rules.factors).items():
        param = pairs[0].target.base
        if param.layer not in (0, 3) or param.expert not in (None, 1):
            continue
        seen.add(param.mca)
        full = full_product(adapter, pairs)
        for rank in range(tp):
            shard = param.shard.take(full, rank, tp)
            group: Any = Group(rank, tp)
            ranks = LinearGroups(group, group, sequence_parallel=tp > 1)
            lora = _lora(pairs, torch.zeros(shard.shape), ranks, 0.0)
            assert lora.state_dict().keys() == dict(lora.named_parameters()).keys()
            factors = {label: both for label, *both in lora.factors()}
            for pair in pairs:
                for rule, live in zip((pair.a, pair.b), factors[pair.target.label], strict=True):
                    piece = torch.from_numpy(np.ascontiguousarray(adapter.piece(rule, rank, tp)))
                    assert live.shape == piece.shape, rule.mca_name()
                    live.data.copy_(piece)
            found = lora.product().numpy(force=True)
            np.testing.assert_allclose(found, shard, rtol=1e-5, atol=1e-5, err_msg=f"{name} on rank {rank}")
    assert len(seen) >= 2


def source_of(config: McaModelConfig, params: Sequence[Param]) -> Any:
    return SimpleNamespace(params=params, config=config, path=None)


@pytest.mark.parametrize("stored", ["separate", "stacked"])
@pytest.mark.parametrize("adapted", ["separate", "stacked"])
def test_factors_of_experts_change_the_rows_of_the_stored_tensor(stored: str, adapted: str) -> None:
    """A base and an adapter of the same experts: gate and up are two tensors of rows each, or one."""
    config = config_of("qwen3_moe")
    both = {
        "separate": random_adapter(config, target_modules=["gate_proj", "up_proj", "down_proj"]),
        "stacked": random_adapter(config, target_modules=["q_proj"], target_parameters=STACKED),
    }
    adapter = both[adapted]
    params = {
        pair.target.base.mca_name(): pair.target.base
        for pair in both[stored].rules.factors
        if pair.target.base.expert
    }
    source = MergedSource.__new__(MergedSource)
    source.adapter = adapter
    for name, param in params.items():
        expected = {}
        for pair in adapter.factors_by_name[name]:
            a, b = (param.from_full(adapter.read(param))[0] for param in (pair.a, pair.b))
            expected[pair.target.part] = pair.scale * b @ a
        truth = np.concatenate([expected[part] for part in sorted(expected)])
        found = np.zeros_like(truth)
        rows = len(truth) // len(param.hf)
        for number in range(len(param.hf)):
            own = found[number * rows : (number + 1) * rows]
            for pair, b, changed in source.factors_on(param, number):
                own[changed] += pair.scale * b @ adapter.read(pair.a)
        np.testing.assert_allclose(found, truth, rtol=1e-5, atol=1e-5, err_msg=name)
    assert len(params) == 24


def test_a_tensor_changes_if_one_of_the_adapters_factors_is_on_it() -> None:
    config = config_of("llama")
    adapter = random_adapter(config, target_modules=["v_proj", "q_proj"], modules_to_save=["lm_head"])
    source = MergedSource.__new__(MergedSource)
    source.adapter = adapter
    (qkv,) = {pair.target.base for pair in adapter.rules.factors if pair.target.base.layer == 2}
    assert [source._changes(qkv, number) for number in range(3)] == [True, False, True]
    (head,) = adapter.rules.saved
    assert source._changes(head, 0) and source.touches(head) and source.touches(qkv)
    assert not source.touches(replace(qkv, mca="decoder.layers.{layer}.mlp.linear_fc1.weight"))


def test_peft_keeps_the_experts_factors_in_two_matrices() -> None:
    """lora_A: the rows of expert 0, of expert 1, ...; lora_B: column 0 of every expert, column 1, ..."""
    experts, r = 4, 3
    config = config_of("qwen3_moe")
    document = {"target_modules": ["q_proj"], "target_parameters": STACKED[:1], "r": r, "lora_alpha": 1}
    adapter_config = AdapterConfig.from_dict({"peft_type": "LORA", **document})
    rules = rules_for_training(config, adapter_config)
    pair = next(each for each in rules.factors if each.target.stacked and each.target.base.expert == 2)
    a = np.arange(experts * r * 5).reshape(experts * r, 5)
    b = np.arange(7 * r * experts).reshape(7, r * experts)
    tensors = {pair.a.hf_names()[0]: a, pair.b.hf_names()[0]: b}
    reader = PeftReader(tensors.__getitem__, experts)
    assert np.array_equal(reader.read(pair.a), a[2 * r : 3 * r])
    assert np.array_equal(reader.read(pair.b), b[:, [2, 6, 10]])
    written = PeftTensors(Adapter(config, adapter_config, rules, reader.read))
    for name, array in tensors.items():
        assert len(written.sources[name]) == experts
        assert np.array_equal(written.array(name), array)
    for param, cut, shape in ((pair.a, a[1:], [11, 5]), (pair.b, b[:, 1:], [7, 11])):
        few = PeftReader(lambda name, cut=cut: cut, experts)
        with pytest.raises(McaError, match=rf"shape \[{shape[0]}, {shape[1]}\] does not divide by 4 experts"):
            few.read(param)


def test_separate_factors_of_an_expert_have_the_product_of_the_stacked_ones() -> None:
    config = config_of("qwen3_moe")
    adapter = random_adapter(config, target_modules=["q_proj"], target_parameters=STACKED)
    tensors = dict(per_expert_tensors(adapter))
    pairs = [pair for pair in adapter.rules.factors if pair.target.stacked]
    assert len(tensors) == 2 * 4 + 4 * 4 * 3 * 2
    for pair in pairs:
        base = pair.target.base
        names = ["gate_proj", "up_proj"] if "fc1" in base.mca else ["down_proj"]
        a, b = (param.from_full(adapter.read(param))[0] for param in (pair.a, pair.b))
        prefix = f"base_model.model.model.layers.{base.layer}.mlp.experts.{base.expert}"
        products = [
            tensors[f"{prefix}.{name}.lora_B.weight"] @ tensors[f"{prefix}.{name}.lora_A.weight"]
            for name in names
        ]
        np.testing.assert_allclose(np.concatenate(products), b @ a, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("everywhere", [False, True])
def test_an_adapter_is_gathered_from_the_first_replica_of_each_shard(
    everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks, tp=2: ranks 2 and 3 are replicas whose values must not be used."""
    from mca_config.layout import RankGrid
    from mca_models.megatron.distributed.parallel import RankContext
    from mca_models.megatron.peft import exchange

    config = config_of("llama", 2, vocab_size=71)  # one row of padding
    settings = {
        "target_modules": ["o_proj", "down_proj", "q_proj", "up_proj"],
        "modules_to_save": ["lm_head"],
    }
    adapter = random_adapter(config, **settings)
    grid = RankGrid(config.layout, 4)
    sent: list[Any] = []
    results: list[Adapter | None] = []

    def send(mine: Any, everyone: list[Any] | None, dst: int) -> None:
        assert dst == 0
        sent.append(mine)
        if everyone is not None:
            assert len(everyone) == 4
            everyone[:] = first_round

    def run_all() -> None:
        sent.clear()
        results.clear()
        for rank in range(4):
            context = RankContext(config.layout, rank, 4, grid.coordinates(rank))
            live = []
            for param in adapter.params:
                piece = torch.from_numpy(np.ascontiguousarray(adapter.piece(param, rank % 2, 2)))
                live.append((param, piece if rank < 2 else piece + 1))
            results.append(
                whole_adapter(live, context, config, adapter.config, adapter.rules, everywhere=everywhere)
            )

    first_round: list[Any] = [{}] * 4
    monkeypatch.setattr(torch.distributed, "gather_object", send)
    monkeypatch.setattr(exchange, "all_gather", lambda mine: (sent.append(mine), list(first_round))[1])
    run_all()
    first_round = list(sent)
    assert not sent[2] and not sent[3]
    run_all()
    assert [found is not None for found in results] == [True] + [everywhere] * 3
    for found in filter(None, results):
        for param in adapter.params:
            assert np.array_equal(found.read(param), adapter.read(param)), param.mca_name()
