"""Factors of adapters: where their scale acts, and the marks by which Megatron treats them."""

from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mca_models.megatron.peft.attach import LinearGroups
from mca_models.megatron.peft.linear import Cut, LoraLinear, LoraPart
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
