"""Factors of adapters: where their scale acts, and the marks by which Megatron treats them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mca_config.errors import McaError
from mca_models.lora.adapter import require_untied
from mca_models.megatron import platform
from mca_models.megatron.peft.attach import LinearGroups
from mca_models.megatron.peft.linear import Cut, LoraLinear, LoraPart, LoraWeight
from mca_models.megatron.peft.models import PeftModels
from mca_models.templates.parts.common import EMBEDDING
from mca_models.weights import COLUMN, Param, Stage


class Products(TorchDispatchMode):
    """Sizes of what is multiplied element by element."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::mul":
            self.sizes.append(out.numel())
        return out


def test_the_scale_is_no_pass_over_outputs() -> None:
    group: Any = SimpleNamespace(size=lambda: 1)
    lora = LoraLinear([LoraPart("q", 2, 3.0, 64)], Cut("none", group), torch.zeros(64, 8))
    torch.manual_seed(0)
    for factor in lora.parameters():
        torch.nn.init.normal_(factor)
    x = torch.randn(5, 8)
    with Products() as products:
        out = lora(x)
    assert products.sizes == [5 * 2]
    torch.testing.assert_close(out, x @ lora.product().T, atol=1e-5, rtol=1e-5)  # sums in fp32


def test_only_decoder_layers_run_in_the_random_state_of_a_rank() -> None:
    group: Any = SimpleNamespace(size=lambda: 2)

    def forked(stage: Stage, *, sequence_parallel: bool = True) -> bool:
        groups = LinearGroups(tensor=group, expert=group, sequence_parallel=sequence_parallel)
        return groups.cut(Param(mca="a.weight", hf=("a.weight",), stage=stage, shard=COLUMN)).forked

    assert [forked(stage) for stage in (Stage.LAYER, Stage.VISION, Stage.LAST)] == [True, False, False]
    assert not forked(Stage.LAYER, sequence_parallel=False)


def test_the_factors_of_a_sharded_linear_name_their_sharded_axis() -> None:
    group: Any = SimpleNamespace(size=lambda: 2)
    for axis, marks in (("rows", [(-1, False), (0, True)]), ("columns", [(1, True), (-1, False)])):
        lora = LoraLinear([LoraPart("q", 2, 3.0, 64)], Cut(axis, group), torch.zeros(64, 8))  # type: ignore[arg-type]
        found: list[Any] = list(lora.parameters())
        assert [(factor.partition_dim, factor.tensor_model_parallel) for factor in found] == marks


@pytest.mark.parametrize("disabled", [[], [False], [True], [True, False]])
def test_an_adapter_is_merged_on_any_rank_unless_it_is_disabled(disabled: list[bool]) -> None:
    def attached(merged: bool) -> Any:
        base = torch.zeros(2)
        return SimpleNamespace(base=base, folded=lambda: base + 1, switch=SimpleNamespace(merged=merged))

    model: Any = SimpleNamespace(merged=False, _attached=[attached(merged) for merged in disabled])
    if any(disabled):
        with pytest.raises(McaError, match="the adapter is disabled"):
            PeftModels.merge_adapter(model)
    else:
        PeftModels.merge_adapter(model)
    assert [item.base.tolist() for item in model._attached] == [[0.0 if any(disabled) else 1.0] * 2] * len(
        disabled
    )


class Ranks:
    def __init__(self, count: int) -> None:
        self.count = count

    def size(self) -> int:
        return self.count


@pytest.mark.parametrize(
    ("axis", "sequence", "expert", "size", "call"),
    [
        ("rows", False, False, 2, "copy_to_tensor_model_parallel_region"),
        ("rows", True, False, 2, "gather_from_sequence_parallel_region"),
        ("columns", False, False, 2, "reduce_from_tensor_model_parallel_region"),
        ("columns", True, False, 2, "reduce_scatter_to_sequence_parallel_region"),
        ("none", True, False, 2, None),
        ("rows", True, False, 1, None),
        ("columns", False, False, 1, None),
        ("rows", False, True, 2, None),
        ("columns", False, True, 2, None),
    ],
)
def test_each_cut_communicates_between_its_factors(
    axis: Any, sequence: bool, expert: bool, size: int, call: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform.prepare()
    from megatron.core import tensor_parallel

    for name in ("copy_to", "reduce_from"):
        name = f"{name}_tensor_model_parallel_region"
        monkeypatch.setattr(tensor_parallel, name, lambda h, group, name=name: (name, h, group))
    for name in ("gather_from", "reduce_scatter_to"):
        name = f"{name}_sequence_parallel_region"
        monkeypatch.setattr(tensor_parallel, name, lambda h, group, name=name: (name, h, group))
    group: Any = Ranks(size)
    cut, h = Cut(axis, group, sequence=sequence, expert=expert), torch.zeros(1)
    found: Any = cut.between(h)
    assert found is h if call is None else found == (call, h, group)
    summed: Any = cut.summed(h)
    assert summed is h if size == 1 else summed == ("copy_to_tensor_model_parallel_region", h, group)


@pytest.mark.parametrize(
    ("axis", "expert", "whole_b", "summed"),
    [
        ("rows", True, False, "A"),
        ("columns", True, False, "B"),
        ("none", True, False, ""),
        ("rows", False, False, ""),
        ("rows", False, True, "B"),
        ("rows", True, True, "AB"),
        ("columns", False, False, ""),
    ],
)
def test_gradients_of_replicated_factors_are_summed_where_ranks_see_parts(
    axis: Any, expert: bool, whole_b: bool, summed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group: Any = Ranks(2)
    cut = Cut(axis, group, expert=expert)
    lora = LoraLinear([LoraPart("q", 2, 3.0, 4, whole_b)], cut, torch.zeros(4, 8))
    seen: list[str] = []
    names = {id(lora.lora_A_q): "A", id(lora.lora_B_q): "B"}
    monkeypatch.setattr(Cut, "summed", lambda self, factor: seen.append(names[id(factor)]) or factor)
    monkeypatch.setattr(Cut, "between", lambda self, h: h)
    assert lora(torch.ones(3, 8)).shape == (3, 4)
    assert "".join(seen) == summed


@pytest.mark.parametrize(
    ("axis", "sequence", "expert", "size", "whole_b", "marks"),
    [
        ("rows", False, False, 2, False, [(False, False, -1), (False, True, 0)]),
        ("rows", True, False, 2, False, [(True, False, -1), (False, True, 0)]),
        ("rows", True, False, 2, True, [(True, False, -1), (False, False, -1)]),
        ("columns", True, False, 2, False, [(False, True, 1), (True, False, -1)]),
        ("columns", False, False, 2, False, [(False, True, 1), (False, False, -1)]),
        ("none", True, False, 2, False, [(True, False, -1), (True, False, -1)]),
        ("none", True, False, 1, False, [(False, False, -1), (False, False, -1)]),
        ("rows", True, True, 2, False, [(False, False, -1), (False, True, 0)]),
    ],
)
def test_factors_are_marked_for_megatron(
    axis: Any, sequence: bool, expert: bool, size: int, whole_b: bool, marks: list[tuple[bool, bool, int]]
) -> None:
    """Marks are sequence_parallel, tensor_model_parallel, and partition_dim of lora_A and of lora_B."""
    group: Any = Ranks(size)
    cut = Cut(axis, group, sequence=sequence, expert=expert)
    lora = LoraLinear([LoraPart("q", 2, 3.0, 4, whole_b)], cut, torch.zeros(4, 8))
    factors: list[Any] = list(lora.parameters())
    assert [
        (each.sequence_parallel, each.tensor_model_parallel, each.partition_dim) for each in factors
    ] == marks
    assert {each.partition_stride for each in factors} == {1}
    assert [tuple(each.shape) for each in factors] == [(2, 8), (4, 2)]


def test_the_adapter_on_a_weight_returns_the_merged_weight_in_its_dtype() -> None:
    group: Any = Ranks(1)
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    lora = LoraWeight([LoraPart("gate", 1, 0.5, 2)], Cut("none", group), weight)
    lora.lora_A_gate.data.copy_(torch.tensor([[2.0, 4.0]]))
    lora.lora_B_gate.data.copy_(torch.tensor([[1.0], [3.0]]))
    found = lora(weight)
    assert found.dtype == torch.bfloat16 and found.tolist() == [[2.0, 4.0], [6.0, 10.0]]


@pytest.mark.parametrize(
    ("tied", "saved", "refused"),
    [
        (True, [EMBEDDING, "a.weight"], True),
        (True, ["a.weight"], False),
        (True, [], False),
        (False, [EMBEDDING], False),
    ],
)
def test_a_tied_embedding_is_not_saved_alone(tied: bool, saved: list[str], refused: bool) -> None:
    head = SimpleNamespace(tie_word_embeddings=tied)
    adapter: Any = SimpleNamespace(
        model=SimpleNamespace(head=head),
        rules=SimpleNamespace(full_params=[SimpleNamespace(mca=name) for name in saved]),
    )
    if not refused:
        require_untied(adapter, "merging")
        return
    with pytest.raises(McaError, match=r"embed_tokens is tied to the output layer.*; merging would need"):
        require_untied(adapter, "merging")
