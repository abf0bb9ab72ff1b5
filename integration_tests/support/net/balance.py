"""Balancing losses and biases of experts by definition, over what transformers' routers see."""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, one_hot

DEFAULT_BIAS_RATE = 1e-3
BIASES = ("e_score_correction_bias", "expert_bias")


@dataclass
class Routed:
    """Inputs and choices of one layer's router, sample by sample.

    Args:
        logits: ``[tokens, experts]`` of each sample.
        counts: Tokens sent to each expert, of each sample.
    """

    logits: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)


class Routers:
    """The expert layers of a model, watched.

    Args:
        model: With all its layers.
        config: transformers' configuration.
        ahead: The MTP layers. The last token of a sample has no next one, and does not count in the first of
            them, the last two not in the second, and so on.
    """

    def __init__(self, model: Any, config: Any, ahead: Iterable[Any] = ()) -> None:
        self.blocks = [block for block in model.modules() if _is_block(block)]
        depths = {id(part): depth for depth, layer in enumerate(ahead, 1) for part in layer.modules()}
        self.depths = [depths.get(id(block), 0) for block in self.blocks]
        routers = [_router(block) for block in self.blocks]
        can = any(_names_sigmoid(type(router)) for router in routers)
        self.sigmoid = can and getattr(config, "expert_selection_fn", "sigmoid") == "sigmoid"
        self.top = max((_top(router, config) for router in routers), default=0)

    @contextmanager
    def watched(self) -> Iterator[list[Routed]]:
        """Record the routing of each layer inside the block."""
        found = [Routed() for _ in self.blocks]
        of_block = zip(self.blocks, found, self.depths, strict=True)
        hooks = [hook for block, routed, depth in of_block for hook in _hooks(block, routed, depth)]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()

    def scores(self, logits: Tensor) -> Tensor:
        """Each token's shares of the experts."""
        if not self.sigmoid:
            return logits.softmax(-1)
        raw = logits.sigmoid()
        return raw / (raw.sum(-1, keepdim=True) + 1e-20)

    def loss(self, kind: str, micro: list[list[Routed]]) -> Tensor:
        """Experts x sum of (share of tokens x mean score), the mean over the tokens of the step, added over layers.

        Args:
            kind: ``aux_loss``: each micro-batch for itself; ``seq_aux_loss``: each sample; ``global_aux_loss``: all.
            micro: By micro-batch and layer.
        """
        total = torch.zeros(())
        for layer in range(len(self.blocks)):
            samples = [[self.scores(logits) for logits in of[layer].logits] for of in micro]
            groups = {
                "aux_loss": [torch.cat(each) for each in samples],
                "seq_aux_loss": [sample for each in samples for sample in each],
                "global_aux_loss": [torch.cat([sample for each in samples for sample in each])],
            }[kind]
            tokens = sum(len(group) for group in groups)
            for group in groups:
                total = total + self._switch(group) * len(group) / tokens
        return total

    def _switch(self, scores: Tensor) -> Tensor:
        experts = scores.shape[-1]
        chosen = one_hot(scores.topk(self.top, -1).indices, experts).sum(1).float()
        return experts * (chosen.mean(0) / self.top * scores.mean(0)).sum()

    def z_loss(self, micro: list[list[Routed]]) -> Tensor:
        """Mean over the step's tokens of the squared log of the summed exponentials, added over layers."""
        total = torch.zeros(())
        for layer in range(len(self.blocks)):
            logits = torch.cat([each for of in micro for each in of[layer].logits])
            total = total + logits.logsumexp(-1).square().mean()
        return total

    @torch.no_grad()
    def move_biases(self, rate: float, micro: list[list[Routed]]) -> None:
        """Towards equal shares by ``rate``, from what was sent to each expert in the whole step."""
        for layer, block in enumerate(self.blocks):
            for bias in biases(block).values():
                counts = torch.stack([count for of in micro for count in of[layer].counts]).sum(0).float()
                bias += rate * torch.sign(counts.mean() - counts)


@cache
def _names_sigmoid(router: type) -> bool:
    return "sigmoid" in inspect.getsource(router)


def _is_block(module: Any) -> bool:
    return not hasattr(module, "base_layer") and bool(_experts(module))


def _experts(block: Any) -> list[Any]:
    return [each for each in map(_bare, block.children()) if type(each).__name__.endswith("Experts")]


def _bare(module: Any) -> Any:
    """Without the adapters around it, which change its parameters while it runs."""
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


def biases(model: Any) -> dict[str, Tensor]:
    """Return the parameters that change without a gradient, by name."""
    named = [*model.named_buffers(), *model.named_parameters()]
    return {name: tensor for name, tensor in named if name.endswith(BIASES)}


def _router(block: Any) -> Any:
    return _bare(getattr(block, "gate", None) or block.router)


def _top(router: Any, config: Any) -> int:
    sizes = (getattr(router, "top_k", None), getattr(config, "top_k_experts", None))
    return int(next(filter(None, sizes), None) or config.num_experts_per_tok)


def _product(router: Any) -> Any:
    """The module whose input makes the logits: the router, or a linear in it that it calls."""
    inner = [_bare(each) for each in router.children()]
    alone = hasattr(router, "weight") or hasattr(router, "classifier")
    return router if alone else next(each for each in inner if hasattr(each, "in_features"))


def _hooks(block: Any, routed: Routed, ahead: int) -> Iterator[Any]:
    product = _product(_router(block))
    (experts,) = _experts(block)

    def see(module: Any, args: tuple[Any, ...]) -> None:
        hidden = args[0].flatten(0, -2).float()
        hidden = hidden[: len(hidden) - ahead]
        module = _bare(getattr(module, "classifier", module))
        routed.logits.append(linear(hidden, module.weight.float(), getattr(module, "bias", None)))

    def count(module: Any, args: tuple[Any, ...]) -> None:
        if len(args) < 2:  # every expert sees every token
            return
        chosen = args[1][: len(args[1]) - ahead].flatten()
        experts = getattr(module, "total_experts", len(module.down_proj))
        routed.counts.append(torch.bincount(chosen, minlength=experts))

    yield product.register_forward_pre_hook(see)
    yield experts.register_forward_pre_hook(count)
