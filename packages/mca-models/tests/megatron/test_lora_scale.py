"""The factor of an adapter acts where there are few channels."""

from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mca_models.megatron.peft.linear import Cut, LoraLinear, LoraPart


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
