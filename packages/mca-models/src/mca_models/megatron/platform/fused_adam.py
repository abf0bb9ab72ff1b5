"""Adam with the interface and the state layout of the fused CUDA optimizers (Apex, Transformer Engine).

``step`` lives in the parameter group and each parameter's state is exactly ``exp_avg`` and ``exp_avg_sq``.
Megatron's distributed optimizer then takes the very code path, and writes the very checkpoint, that it does on
a GPU; its path for ``torch.optim.AdamW`` cannot be resumed (see ``distributed_adam.py``).
"""

from collections.abc import Callable, Iterable

import torch

from mca_models.megatron.types import Settings, Upstream


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
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
                self._step_group(group)

    def _step_group(self, group: Settings) -> None:
        beta1, beta2 = group["betas"]
        correction1 = correction2 = 1.0
        if group["bias_correction"]:
            correction1, correction2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if "exp_avg" not in state:
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            grad = param.grad.to(param.dtype)
            if self.adam_w_mode:
                param.mul_(1 - group["lr"] * group["weight_decay"])
            else:
                grad = grad + group["weight_decay"] * param
            state["exp_avg"].lerp_(grad, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            denominator = (state["exp_avg_sq"] / correction2).sqrt_().add_(group["eps"])
            param.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / correction1)
