"""Adam with the interface and the state layout of the fused CUDA optimizers (Apex, Transformer Engine).

``step`` is in the parameter group and each parameter's state is exactly ``exp_avg`` and ``exp_avg_sq``. Megatron's
distributed optimizer then uses the same code path and writes the same checkpoint as on a GPU; its path for
``torch.optim.AdamW`` cannot be resumed (see ``distributed_adam.py``).
"""

from collections.abc import Callable, Iterable, Iterator

import torch

from mca_models.megatron.types import Settings, Upstream

_ELEMENTS = 2**24
"""Maximum number of elements updated together: temporaries take 128 MiB."""


class FusedAdam(torch.optim.Optimizer):
    """AdamW (or, with ``adam_w_mode=False``, Adam with L2 regularisation) in plain PyTorch."""

    def __init__(
        self,
        params: Iterable[Upstream],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **_: object,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
            },
        )
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
                self._step_group(group)

    def _step_group(self, group: Settings) -> None:
        beta1, beta2 = group["betas"]
        correction1 = correction2 = 1.0
        if group["bias_correction"]:
            correction1, correction2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
        for params in _launch_groups([param for param in group["params"] if param.grad is not None]):
            means, squares = self._moments(params)
            grads: list[Upstream] = [param.grad.to(param.dtype) for param in params]
            if self.adam_w_mode:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            else:
                grads = [*torch._foreach_add(grads, torch._foreach_mul(params, group["weight_decay"]))]
            torch._foreach_lerp_(means, grads, 1 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
            roots = torch._foreach_div(squares, correction2)
            torch._foreach_sqrt_(roots)
            torch._foreach_add_(roots, group["eps"])
            torch._foreach_addcdiv_(params, means, roots, value=-group["lr"] / correction1)

    def _moments(self, params: list[Upstream]) -> tuple[list[Upstream], list[Upstream]]:
        """Return means of gradients and of their squares."""
        for param in params:
            state = self.state[param]
            if "exp_avg" not in state:
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        states = [self.state[param] for param in params]
        return [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]


def _launch_groups(params: list[Upstream]) -> Iterator[list[Upstream]]:
    """Yield groups of parameters for one kernel launch each, limited by the memory of temporaries."""
    group: list[Upstream] = []
    elements = 0
    for param in params:
        size = param.numel()
        if group and elements + size > _ELEMENTS:
            yield group
            group, elements = [], 0
        group.append(param)
        elements += size
    if group:
        yield group
