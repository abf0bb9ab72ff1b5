"""Hooks on linears that cannot run here: Transformer Engine's, by stand-ins of their shape."""

from dataclasses import replace
from typing import Any

import pytest
import tiny_hf
import torch
from torch import Tensor
from torch.nn.functional import linear

from mca_config.errors import McaError
from mca_models.lora import AdapterConfig, rules_for_training
from mca_models.lora.rules import AdapterRules
from mca_models.megatron.names import LocalParam
from mca_models.megatron.peft.attach import (
    Attached,
    LinearGroups,
    attach,
    begin_gradients,
    detach,
    warn_unused_dropout,
)
from mca_models.megatron.peft.create import initial_values
from mca_models.megatron.peft.linear import Cut, LoraLinear, LoraPart
from mca_models.templates import config_from_hf, get_family


class Alone:
    """A group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


RANKS = LinearGroups(Alone(), Alone(), sequence_parallel=False)


class FusedNorm(torch.nn.Module):
    """Stand-in for TELayerNormColumnParallelLinear, which returns its arguments."""

    def __init__(self, rows: int, columns: int, *, with_bias: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(rows, columns))
        self.return_layernorm_output = False
        self.te_return_bias = with_bias

    def forward(self, x: Tensor) -> Any:
        normed = x / x.norm(dim=-1, keepdim=True)
        y, bias = linear(normed, self.weight), torch.ones(3)
        if self.te_return_bias:
            return (y, bias, normed) if self.return_layernorm_output else (y, bias)
        return ((y, normed) if self.return_layernorm_output else y), None


class Grouped(torch.nn.Module):
    """Stand-in for TEGroupedLinear."""

    def __init__(self, experts: int, rows: int, columns: int) -> None:
        super().__init__()
        for number in range(experts):
            self.register_parameter(f"weight{number}", torch.nn.Parameter(torch.randn(rows, columns)))

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, None]:
        parts = torch.split(x, m_splits)
        return torch.cat([linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(parts)]), None


def rules_of(case: str, targets: list[str]) -> AdapterRules:
    model_type, different = tiny_hf.CASES[case]
    model = config_from_hf({**tiny_hf.SIZE, **different, "model_type": model_type})
    config = AdapterConfig.from_dict(
        {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": targets}
    )
    return rules_for_training(model, config)


def held(
    rules: AdapterRules, live: dict[str, str], chunk: torch.nn.Module
) -> list[tuple[LocalParam, Tensor]]:
    parameters = dict(chunk.named_parameters())
    bases = {pair.target.base.mca_name(): pair.target.base for pair in rules.factors}
    return [(LocalParam(name, bases[mca]), parameters[name]) for mca, name in live.items()]


def randomise(items: list[Attached]) -> None:
    with torch.no_grad():
        for item in items:
            for _, tensor in item.live:
                tensor.normal_()


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_fused_norm_gives_lora_the_normed_input(with_bias: bool) -> None:
    rules = rules_of("llama", ["q_proj", "v_proj"])
    chunk = torch.nn.Module()
    chunk.qkv = FusedNorm(128, 32, with_bias=with_bias)
    chunk.qkv.register_forward_hook(lambda module, given, output: (2 * output[0], *output[1:]))
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    (item,) = attach(
        chunk, held(rules, {name: "qkv.weight"}, chunk), rules, RANKS, dropout=0.0, grouped=False
    )
    randomise([item])
    x = torch.randn(5, 2, 32)
    y, bias = chunk.qkv(x)
    assert (bias is not None) == with_bias
    merged = chunk.qkv.weight + item.lora.product()
    expected = 2 * linear(x / x.norm(dim=-1, keepdim=True), merged)
    torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)
    k_rows = item.lora.product().reshape(2, 4, 16, 32)[:, 2]  # [q q k v] of each group
    assert bool((k_rows == 0).all())
    detach([item])
    output = chunk.qkv(x)
    assert len(output) == 2
    assert isinstance(output[0], Tensor)


@pytest.mark.parametrize(
    ("targets", "leaf", "columns", "factors"),
    [
        (["gate_proj", "up_proj"], "linear_fc1", 32, 2 * (2 * 32 + 16 * 2)),
        (["down_proj"], "linear_fc2", 16, 2 * 16 + 32 * 2),
    ],
)
def test_grouped_experts_get_their_own_factors(
    targets: list[str], leaf: str, columns: int, factors: int
) -> None:
    rules = rules_of("qwen3_moe", targets)
    some = AdapterRules(tuple(pair for pair in rules.factors if pair.target.base.expert in (0, 2)))
    chunk = torch.nn.Module()
    chunk.fc = Grouped(3, 32, columns)
    prefix = f"decoder.layers.1.mlp.experts.{leaf}.weight"
    live = {f"{prefix}{number}": f"fc.weight{number}" for number in (0, 2)}
    items = list(attach(chunk, held(some, live, chunk), some, RANKS, dropout=0.0, grouped=True))
    randomise(items)
    x, splits = torch.randn(9, columns), [4, 0, 5]
    first, last = (item.base + item.lora.product() for item in items)
    expected = torch.cat([linear(x[:4], first), linear(x[4:], last)])
    torch.testing.assert_close(chunk.fc(x, splits)[0], expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(chunk.fc.lora(x, torch.tensor(splits)), chunk.fc.lora(x, splits))
    assert sum(p.numel() for p in chunk.fc.lora.parameters()) == 2 * factors
    before = chunk.fc(x, [3, 3, 3])[0][3:6]
    detach(items)
    torch.testing.assert_close(chunk.fc(x, [3, 3, 3])[0][3:6], before)  # expert 1 had none


def test_dropout_is_of_the_input_and_only_in_training() -> None:
    torch.manual_seed(0)  # a mean of 4000 draws is compared: another test's last draw must not decide
    rules = rules_of("llama", ["o_proj"])
    chunk = torch.nn.Module()
    chunk.proj = FusedNorm(32, 64, with_bias=False)
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    (item,) = attach(
        chunk, held(rules, {name: "proj.weight"}, chunk), rules, RANKS, dropout=0.5, grouped=False
    )
    randomise([item])
    x = torch.ones(4000, 64)
    assert not torch.equal(item.lora(x), item.lora(x))
    torch.testing.assert_close(
        item.lora(x).mean(0), linear(x[:1], item.lora.product())[0], atol=1.5, rtol=0.1
    )
    item.lora.eval()
    torch.testing.assert_close(item.lora(x[:2]), linear(x[:2], item.lora.product()), atol=1e-4, rtol=1e-4)


def test_fewer_groups_than_ranks_take_the_rows_they_need() -> None:
    """Three ranks' rows of lora_B are the packed rows' share, wherever a query group is cut."""
    from mca_models.megatron.peft.attach import _order
    from mca_models.megatron.peft.linear import Cut, LoraPart
    from mca_models.weights import Param

    class Rank(Alone):
        def __init__(self, rank: int, size: int) -> None:
            self._rank, self._size = rank, size

        def size(self) -> int:
            return self._size

        def rank(self) -> int:
            return self._rank

    model_type, _ = tiny_hf.CASES["llama"]
    model = config_from_hf({**tiny_hf.SIZE, "model_type": model_type})
    base: Param = next(p for p in get_family(model_type).params(model) if "linear_qkv.weight" in p.mca)
    sizes = (64, 32, 32)
    columns = [torch.arange(size).unsqueeze(1) + 1000 * i for i, size in enumerate(sizes)]
    whole = base.to_full(columns)
    rules = rules_of("llama", ["q_proj", "k_proj", "v_proj"])
    pairs = [replace(pair, target=replace(pair.target, base=base)) for pair in rules.factors[:3]]
    for size in (4, 8):
        for rank in range(size):
            parts = [
                LoraPart(pair.target.label, 2, 1.0, n, whole_b=True)
                for pair, n in zip(pairs, sizes, strict=True)
            ]
            order = _order(pairs, parts, sizes, Cut("rows", Rank(rank, size)))
            assert order is not None
            mine = torch.cat(columns)[order].flatten()
            assert torch.equal(mine, base.shard.take(whole, rank, size).flatten())


@pytest.mark.parametrize(
    ("change", "target", "message"),
    [
        ({"fuser": True}, "up_proj", "use_transformer_engine_op_fuser"),
        ({"fuser": True}, "q_proj", None),
        ({"overlap": True}, "up_proj", None),
    ],
)
def test_what_hooks_do_not_see_is_refused(change: dict[str, bool], target: str, message: str | None) -> None:
    rules = rules_of("llama", [target])
    chunk = torch.nn.Module()
    chunk.linear = FusedNorm(128 if target == "q_proj" else 96, 32, with_bias=False)
    live = {rules.factors[0].target.base.mca_name(): "linear.weight"}
    put = {"dropout": 0.0, "grouped": False}
    ranks = replace(RANKS, **change)
    if message is None:
        assert list(attach(chunk, held(rules, live, chunk), rules, ranks, **put))
        return
    with pytest.raises(McaError, match=message):
        list(attach(chunk, held(rules, live, chunk), rules, ranks, **put))


def test_adapters_that_dropout_does_not_reach_are_named(caplog: pytest.LogCaptureFixture) -> None:
    warn_unused_dropout(rules_of("qwen2_moe", ["shared_expert_gate", "q_proj"]), 0.0)
    warn_unused_dropout(rules_of("qwen2_moe", ["q_proj"]), 0.1)
    assert not caplog.messages
    warn_unused_dropout(rules_of("qwen2_moe", ["shared_expert_gate", "q_proj"]), 0.1)
    assert "lora_dropout: not applied to shared_expert_gate" in caplog.text


@pytest.mark.parametrize(
    ("attributes", "summed_over_data"),
    [({}, True), ({"allreduce": True}, True), ({"allreduce": False}, False)],
)
def test_factors_are_summed_over_the_ranks_of_their_base(
    attributes: dict[str, bool], summed_over_data: bool
) -> None:
    base = torch.nn.Parameter(torch.zeros(4, 3))
    for name, value in attributes.items():
        setattr(base, name, value)
    module = LoraLinear([LoraPart("q", 2, 1.0, 4)], Cut("rows", Alone()), base)
    found = [vars(factor)["allreduce"] for factor in module.parameters()]
    assert found == [summed_over_data] * 2


@pytest.mark.parametrize(("start", "deviation"), [(True, 1 / (3 * 400) ** 0.5), ("gaussian", 1 / 8)])
@pytest.mark.parametrize("seed", [0, 1])
def test_new_factors_have_the_deviation_of_pefts(start: bool | str, deviation: float, seed: int) -> None:
    rules = rules_of("llama", ["q_proj"])
    config = AdapterConfig.from_dict(
        {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], "init_lora_weights": start}
    )
    draw, pair = initial_values(config, seed), rules.factors[0]
    values = draw(pair.a, (8, 400))
    assert values.std() == pytest.approx(
        deviation, rel=0.05
    )  # of 3,200 numbers: 4 deviations of the estimate
    assert start == "gaussian" or abs(values).max() <= 1 / 20
    assert (draw(pair.a, (8, 400)) == values).all() and not draw(pair.b, (5, 8)).any()
    assert (initial_values(config, seed + 1)(pair.a, (8, 400)) != values).any()


def test_factors_are_peft_s_if_a_configuration_does_not_say_how_they_start() -> None:
    rules = rules_of("llama", ["q_proj"])
    asked = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}
    plain = initial_values(AdapterConfig.from_dict(asked), 3)
    drawn = initial_values(AdapterConfig.from_dict(asked | {"init_lora_weights": False}), 3)
    pair = rules.factors[0]
    assert not plain(pair.b, (5, 8)).any() and drawn(pair.b, (5, 8)).all()
    assert (plain(pair.a, (8, 40)) == drawn(pair.a, (8, 40))).all()


@pytest.mark.parametrize(("gradients", "already"), [(True, False), (False, False), (True, True)])
def test_the_output_of_a_frozen_embedding_requires_gradients_in_training(
    gradients: bool, already: bool
) -> None:
    chunk = torch.nn.Module()
    assert list(begin_gradients(chunk)) == []
    chunk.embedding = torch.nn.Embedding(3, 2).requires_grad_(already)
    (handle,) = begin_gradients(chunk)
    with torch.set_grad_enabled(gradients):
        output = chunk.embedding(torch.tensor([1]))
    assert output.requires_grad is gradients and output.is_leaf is (not already)
    handle.remove()
    assert chunk.embedding(torch.tensor([1])).requires_grad is already
