"""Tensors that arrive whole or in rows, in any order: those that are complete, and the error about the others."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_config.errors import McaError
from mca_models.megatron.state import load
from mca_models.megatron.state.load import _Loading, _Use
from mca_models.megatron.state.weight_receiver import WeightReceiver, receive_all
from mca_models.storage.byte_ranges import Move

WHOLE = torch.arange(12.0).view(4, 3)


def receiver() -> WeightReceiver:
    return WeightReceiver({"a": (4, 3), "b": (), "c": (0, 3)}, {"twin": (4, 3), "a": (9, 9)})


@pytest.mark.parametrize("order", [[0, 1, 3], [3, 0, 1], [1, 3, 0]])
@pytest.mark.parametrize("keep", [False, True])
def test_rows_in_any_order_become_the_tensor(order: list[int], keep: bool) -> None:
    made, memory = receiver(), torch.empty(2, 3)
    ends = {0: 1, 1: 3, 3: 4}
    for number, start in enumerate(order):
        rows = memory[: ends[start] - start]
        rows.copy_(WHOLE[start : ends[start]])
        arrived = made.receive("a", rows, start, keep=keep)
        rows.fill_(-1)  # its sender uses the memory again
        is_last = number == len(order) - 1
        assert (arrived is not None) == (is_last and keep) and made.is_complete("a") == is_last
    if keep:
        assert torch.equal(arrived, WHOLE) and made._all["a"].parts is None  # type: ignore[arg-type]


def test_rows_keep_their_dtype() -> None:
    made, whole = receiver(), WHOLE.bfloat16()
    assert made.receive("a", whole[:2], 0) is None
    arrived = made.receive("a", whole[2:], 2)
    assert arrived is not None and arrived.dtype == torch.bfloat16 and torch.equal(arrived, whole)


def test_a_whole_tensor_is_returned_as_it_is() -> None:
    made = receiver()
    assert made.receive("a", WHOLE, None) is WHOLE and made.receive("twin", WHOLE, 0) is WHOLE
    number = torch.tensor(3.0)
    assert made.receive("b", number, None) is number and made.is_complete("b")
    assert made.expected_shape("a") == (4, 3) and made.expected_shape("d") is None
    assert made.receive("c", torch.zeros(0, 3), None) is not None
    made.finish()


@pytest.mark.parametrize(
    ("name", "tensor", "start", "problem"),
    [
        ("d", WHOLE, None, "1 unexpected tensor (d)"),
        ("a", WHOLE[:3], None, "a has shape [3, 3], expected [4, 3]"),
        ("a", WHOLE[:3], 2, "a has shape [3, 3] from row 2 on, expected [4, 3]"),
        ("a", WHOLE[:3], -1, "a has shape [3, 3] from row -1 on, expected [4, 3]"),
        ("a", WHOLE[:, :2], 0, "a has shape [4, 2] from row 0 on, expected [4, 3]"),
        ("a", WHOLE[0], None, "a has shape [3], expected [4, 3]"),
        ("a", WHOLE[None], None, "a has shape [1, 4, 3], expected [4, 3]"),
        ("b", torch.zeros(1), None, "b has shape [1], expected []"),
        ("a", WHOLE.bool(), None, "a has dtype bool, expected "),
        ("a", WHOLE, 1, "a has shape [4, 3] from row 1 on, expected [4, 3]"),
    ],
)
def test_a_tensor_that_does_not_fit_is_reported_and_not_missed(
    name: str, tensor: torch.Tensor, start: int | None, problem: str
) -> None:
    made = receiver()
    assert made.receive(name, tensor, start) is None
    for other, own in (("a", WHOLE), ("b", torch.tensor(1.0)), ("c", torch.zeros(0, 3))):
        if other != name:
            made.receive(other, own, None)
    with pytest.raises(McaError) as error:
        made.finish()
    assert problem in str(error.value)
    assert "missing" not in str(error.value)


@pytest.mark.parametrize(
    ("ranges", "is_twice"),
    [
        ([(0, 2), (2, 4)], False),
        ([(2, 4), (0, 2)], False),
        ([(0, 2), (1, 3)], True),
        ([(1, 3), (0, 2)], True),
        ([(0, 4), (1, 2)], True),
        ([(1, 2), (1, 2)], True),
        ([(0, 1), (3, 4), (1, 3)], False),
    ],
)
def test_rows_that_come_twice_are_reported(ranges: list[tuple[int, int]], is_twice: bool) -> None:
    made = WeightReceiver({"a": (4, 3)}, {})
    for first, last in ranges:
        made.receive("a", WHOLE[first:last], first)
    if is_twice:
        with pytest.raises(McaError, match="a came twice"):
            made.finish()
    else:
        made.finish()


def test_required_tensors_that_lack_rows_are_missing() -> None:
    made = receiver()
    made.receive("a", WHOLE[:3], 0)
    with pytest.raises(McaError, match=r"2 missing tensors \(a, b\)"):
        made.finish()
    assert made.is_complete("c"), "it has no rows"
    made.report("a", "a is wrong")
    made.report("b", "b is wrong")
    with pytest.raises(McaError) as error:
        made.finish()
    assert "a is wrong" in str(error.value) and "missing" not in str(error.value)


def test_weights_with_and_without_a_first_row_are_received() -> None:
    calls: list[Any] = []
    receive_all([("a", WHOLE), ("b", WHOLE, 2)], lambda *values: calls.append(values))
    assert [(name, start) for name, _, start in calls] == [("a", None), ("b", 2)]


def loading(copies: dict[str, str]) -> tuple[Any, torch.Tensor]:
    """Return a rank that needs the second and third rows of the second of two stacked tensors of 4 x 3."""
    made = _Loading.__new__(_Loading)
    live = torch.zeros(6)
    made._copies = copies
    made._uses = {"a": [_Use(live, [Move(0, 3, 0, 3, 2, 3, 3)], 12)]}
    made.receiver = WeightReceiver({"a": (8, 3), "other": (1,)}, dict.fromkeys(copies, (8, 3)))
    return made, live


def test_a_rank_copies_its_elements_of_what_it_needs() -> None:
    made, live = loading({})
    made.receive("other", torch.ones(1), None)
    made.receive("a", torch.arange(12.0).view(4, 3), 0)
    assert not live.any() and not made.uses("other") and made.uses("a")
    made.receive("a", torch.arange(12.0, 24).view(4, 3), 4)
    assert live.tolist() == [15, 16, 17, 18, 19, 20]
    made.receiver.finish()


@pytest.mark.parametrize("differs", [None, 14, 15, 20, 21])
@pytest.mark.parametrize("first", ["a", "copy"])
def test_a_tied_tensor_must_have_the_same_elements_on_this_rank(differs: int | None, first: str) -> None:
    made, live = loading({"copy": "a"})
    made.receive("other", torch.ones(1), None)
    names = [first, "copy" if first == "a" else "a"]
    assert made.uses("copy")
    made.receive(names[0], torch.arange(24.0).view(8, 3), None)
    assert live.tolist() == [15, 16, 17, 18, 19, 20]
    second = torch.arange(24.0)
    if differs is not None:
        second[differs] += 1
    made.receive(names[1], second.view(8, 3), None)
    assert live.tolist() == [15, 16, 17, 18, 19, 20], "the first is kept"
    if differs in (15, 20):
        with pytest.raises(McaError, match=f"{names[1]} differs from the tensor that it is tied to"):
            made.receiver.finish()
    else:
        made.receiver.finish()


def test_each_parameter_knows_the_elements_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expert 2 of a stacked tensor whose parts have 6 and 4 elements; rank 1 of 2."""
    moves = (Move(0, 1, 0, 2, 1, 2, 2), Move(1, 3, 2, 2, 1, 2, 2))
    plans = {2: ["other", SimpleNamespace(moves=moves, zeros=[(4, 6)])]}
    monkeypatch.setattr(load, "shard_rank_and_size", lambda param, layout, coordinates: (1, 2))
    monkeypatch.setattr(load, "full_shape", lambda param, config: "shape")
    monkeypatch.setattr(load, "plan_gathers", lambda param, shape, side, cut: plans[cut])
    monkeypatch.setattr(load, "_shapes", lambda param, models: {"first": (3, 2), "second": (2, 2)})
    made = _Loading.__new__(_Loading)
    made._uses = {}
    context = SimpleNamespace(layout=None, coordinates=None)
    models: Any = SimpleNamespace(config=None, rank_context=context)
    param: Any = SimpleNamespace(shard=SimpleNamespace(axis=0), expert=2, stacked=True)
    live = torch.ones(3, 2)
    made._add(param, SimpleNamespace(param=param), live, models)  # type: ignore[arg-type]
    assert live.flatten().tolist() == [1, 1, 1, 1, 0, 0]
    uses = {name: [(list(use.moves), use.first) for use in own] for name, own in made._uses.items()}
    assert uses == {"first": [([moves[0]], 12)], "second": [([moves[1]], 8)]}
    plans[1] = plans.pop(2)
    param.shard.axis, param.stacked = None, False
    made._add(param, SimpleNamespace(param=param), live, models)  # type: ignore[arg-type]
    assert [use.first for use in made._uses["first"]] == [12, 0]


def test_a_tied_tensor_is_compared_at_each_place_where_it_is_used() -> None:
    made, live = loading({"copy": "a"})
    made.receive("a", torch.arange(24.0).view(8, 3), None)
    made._uses["a"].append(_Use(live.clone().add_(1), made._uses["a"][0].moves, 12))
    made.receive("copy", torch.arange(24.0).view(8, 3), None)
    with pytest.raises(McaError, match="copy differs from the tensor that it is tied to"):
        made.receiver.finish()
