"""Heads that differ from Megatron's: rows of their projection, what they project to, and gates, by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mca_models.megatron.features.heterogeneous_heads import (
    HeadSettings,
    _normalize_values,
    _SplitByHeads,
    sized,
)

HEADS, GROUPS, WIDTH, VALUES = 4, 2, 3, 2


def settings(**more: Any) -> HeadSettings:
    plain = {"settings": (GROUPS, WIDTH, "vanilla", None), "values": VALUES, "values_are_keys": False}
    plain |= {"norm": None, "scale": 1.0, "reuses_kv": False, "shares_kv": False, "gate": False}
    return HeadSettings(**plain | more)


def split(heads: HeadSettings, mixed: Tensor) -> Any:
    """Return an attention with 4 heads in 2 groups on this rank, whose projection returns ``mixed``."""
    made: Any = _SplitByHeads()
    made.heads, made.config = heads, SimpleNamespace(kv_channels=WIDTH)
    made.num_attention_heads_per_partition, made.num_query_groups_per_partition = HEADS, GROUPS
    made.linear_qkv = lambda hidden: (mixed, None)
    made.q_layernorm, made.k_layernorm = lambda x: x + 1000, lambda x: x + 2000
    made.reused_kv = None
    return made


@pytest.mark.parametrize(
    ("more", "rows"),
    [
        ({}, [6, 3, 2]),
        ({"gate": True}, [6, 3, 2, 2]),
        ({"values_are_keys": True}, [6, 3]),
        ({"values_are_keys": True, "gate": True}, [6, 3, 2]),
        ({"reuses_kv": True}, [6]),
        ({"reuses_kv": True, "gate": True}, [6, 2]),
    ],
)
def test_a_group_projects_to_its_queries_keys_values_and_gates(more: dict[str, Any], rows: list[int]) -> None:
    assert split(settings(**more), torch.empty(0)).qkv_group_rows() == rows


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("values_are_keys", [False, True])
@pytest.mark.parametrize("shares_kv", [False, True])
def test_projections_are_split_group_by_group(gate: bool, values_are_keys: bool, shares_kv: bool) -> None:
    """Keys are normalized, values that are keys are the keys before."""
    heads = settings(gate=gate, values_are_keys=values_are_keys, shares_kv=shares_kv, scale=10.0)
    rows = GROUPS * sum(heads.group_rows(HEADS // GROUPS))
    mixed = torch.arange(2.0 * rows).view(2, 1, rows)
    made = split(heads, mixed)
    query, key, value = made.get_query_key_value_tensors(torch.empty(0))
    groups = mixed.view(2, 1, GROUPS, -1)
    assert torch.equal(query, groups[..., :6].reshape(2, 1, HEADS, WIDTH) + 1000)
    assert torch.equal(key, groups[..., 6:9] + 2000)
    assert torch.equal(value, 10 * (groups[..., 6:9] if values_are_keys else groups[..., 9:11]))
    assert (made.gate is None) == (not gate)
    if gate:
        assert torch.equal(made.gate, groups[..., -2:].reshape(2, 1, HEADS))
    shared = made.shared_kv
    assert (shared is not None) == shares_kv
    assert not shares_kv or (shared[0] is key and shared[1] is value)


def test_a_layer_takes_the_keys_of_another_once() -> None:
    made = split(settings(reuses_kv=True), torch.arange(24.0).view(2, 1, 12))
    made.reused_kv = ("keys", "values")
    query, *others = made.get_query_key_value_tensors(torch.empty(0))
    assert torch.equal(query, torch.arange(24.0).view(2, 1, HEADS, WIDTH) + 1000)
    assert others == ["keys", "values"] and made.reused_kv is None


def test_a_norm_that_is_not_there_changes_nothing() -> None:
    made = split(settings(), torch.arange(22.0).view(1, 1, 22))
    made.q_layernorm = made.k_layernorm = None
    query, key, _ = made.get_query_key_value_tensors(torch.empty(0))
    assert query.flatten().tolist() == [*range(6), *range(11, 17)]
    assert key.flatten().tolist() == [6, 7, 8, 17, 18, 19]


def test_the_output_of_each_head_is_multiplied_by_its_gate_once() -> None:
    made = split(settings(gate=True), torch.empty(0))
    generator = torch.Generator().manual_seed(2)
    output, gate = torch.randn(5, 2, HEADS * VALUES, generator=generator), torch.randn(5, 2, HEADS)
    made.gate = gate
    scaled, *rest = made._apply_gate(torch.nn.Identity(), (output, torch.ones(1)))
    expected = [
        output[..., 2 * head : 2 * head + 2] * gate[..., head : head + 1].sigmoid() for head in range(4)
    ]
    torch.testing.assert_close(scaled, torch.cat(expected, -1))
    assert len(rest) == 1 and made.gate is None


@pytest.mark.parametrize("norm", [None, 0.25])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_values_are_normalized_and_scaled(norm: float | None, scale: float) -> None:
    values = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    expected = values if norm is None else values / (values.square().mean(-1, keepdim=True) + norm).sqrt()
    found = _normalize_values(values, settings(norm=norm, scale=scale))
    torch.testing.assert_close(found, expected * scale)
    half = _normalize_values(values.bfloat16(), settings(norm=norm, scale=scale))
    torch.testing.assert_close(half, (expected.bfloat16() * scale))


@pytest.mark.parametrize(
    ("sizes", "made"),
    [({}, (7, 9)), ({"rows": 4}, (7, 4)), ({"columns": 4}, (4, 9)), ({"rows": 2, "columns": 3}, (3, 2))],
)
def test_a_linear_may_have_a_fixed_number_of_rows_or_columns(
    sizes: dict[str, int], made: tuple[int, int]
) -> None:
    linear = sized(torch.nn.Linear, **sizes)(7, 9, bias=False)
    assert (linear.in_features, linear.out_features, linear.bias) == (*made, None)
