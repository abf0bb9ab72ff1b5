"""Transformers' models whose routers take given experts and weigh them by their own scores."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from mca_models.megatron.features.router_replay import RoutedExperts


@contextmanager
def forced_experts(model: Any, experts: Tensor, shape: RoutedExperts) -> Iterator[None]:
    """Make the last ``topk`` over all experts in each MoE block of ``model`` choose ``experts``.

    Args:
        model: A transformers model that is called with one batch in this block.
        experts: ``[batch, seq, layers with experts, topk]``
        shape: Their shape.
    """
    halves = 2 if hasattr(model.config, "zero_expert_num") else 1  # a layer is two of ours
    running: list[Tensor] = []
    uses: dict[int, int] = {}

    def enter(number: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...]) -> None:
            running[:] = [experts[:, :, number].flatten(0, 1).long()]
            uses[number] = 0

        return hook

    def leave(module: Any, args: tuple[Any, ...], output: Any) -> None:
        running.clear()

    real = torch.topk

    def topk(scores: Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        if not running or scores.shape[-1] != shape.num_experts or k != shape.topk:
            return real(scores, k, *args, **kwargs)
        uses[max(uses)] += 1
        chosen = running[0].view(*scores.shape[:-1], k)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))

    modules = dict(model.named_modules())
    hooks = []
    for name, module in modules.items():
        if type(module).__name__.endswith("Experts") and not hasattr(module, "expert_dim"):
            block = modules[name.rpartition(".")[0]]
            number = shape.layers.index(int(name.split(".")[2]) * halves)
            hooks += [block.register_forward_pre_hook(enter(number)), block.register_forward_hook(leave)]
    assert len(hooks) == 2 * len(shape.layers), "not all MoE blocks were found"
    with patch.object(torch, "topk", topk), patch.object(Tensor, "topk", topk):
        yield
    for hook in hooks:
        hook.remove()
    assert set(uses.values()) == {1}, f"choices in each block: {uses}"


def other_experts(shape: RoutedExperts, batch: int, seq: int, seed: int = 5) -> Tensor:
    """Draw different experts for each token and layer: ``[batch, seq, layers, topk]``."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(batch, seq, len(shape.layers), shape.num_experts, generator=generator)
    return draws.argsort(-1)[..., : shape.topk]
