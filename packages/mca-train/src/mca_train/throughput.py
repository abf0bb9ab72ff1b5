"""How well a run uses its devices: model FLOP/s, MFU, memory, and the pipeline's bubble.

Model FLOP of a token, forward and backward: ``6 x weights that multiply it + 6 x layers x heads x head size x
sequence length``. The weights are all matrices but the embedding (of the experts, the share that the router picks);
the second part is causal attention, which looks at half the sequence on average. Recomputation does not count. The
sequence length is the mean of the samples since the last log; sliding windows and linear attention count as whole
attention. MFU is model FLOP/s divided by ranks x peak.
"""

import resource
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from mca_config.model_config import McaModelConfig
from mca_train import groups
from mca_train.groups import Ranks
from mca_train.progress import LossReport

PEAK_TFLOPS = {
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H20": 148.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10G": 70.0,
    "V100": 125.0,
}
"""Dense bf16 (V100: fp16) peaks, by a part of the device's name; the first that fits holds."""

_TERA = 1e12
_GIB = 1024**3


@dataclass(frozen=True)
class ModelFlops:
    """FLOP of a training step's tokens.

    Args:
        per_token: Of the weights.
        per_token_and_length: Of attention; times the sequence length.
    """

    per_token: float
    per_token_and_length: float

    @classmethod
    def of(cls, config: McaModelConfig) -> "ModelFlops":
        """Counted from the model's own parameters."""
        from mca_train.plan import params_of, shape_of

        weights = 0.0
        for param in params_of(config):
            shape = shape_of(param, config)
            if len(shape) < 2 or param.mca_name().startswith("embedding."):
                continue
            share = config.moe_router_topk / config.num_moe_experts if param.expert is not None else 1.0  # type: ignore[operator]
            weights += prod(shape) * share
        heads = config.num_attention_heads * config.kv_channels
        return cls(6.0 * weights, 6.0 * config.num_layers * heads)

    def of_tokens(self, tokens: int, samples: int) -> float:
        """FLOP of ``tokens`` in ``samples`` sequences."""
        length = tokens / max(samples, 1)
        return tokens * (self.per_token + self.per_token_and_length * length)


def peak_flops(args: Any, device: torch.device) -> float | None:
    """Of one device: what ``peak_tflops`` says, else a known GPU's in half precision, else unknown."""
    given = getattr(args, "peak_tflops", None)
    if given:
        return float(given) * _TERA
    if device.type != "cuda" or not (args.bf16 or args.fp16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak * _TERA for part, peak in PEAK_TFLOPS.items() if part in name), None)


def peak_memory(device: torch.device) -> float:
    """GiB that this rank has held at most: of the GPU, or without one of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB


class Throughput:
    """What a log says about speed besides tokens and samples per second.

    Args:
        args: Training arguments.
        config: The model.
        ranks: This rank.
    """

    def __init__(self, args: Any, config: McaModelConfig, ranks: Ranks) -> None:
        self._flops = ModelFlops.of(config)
        self._peak = peak_flops(args, ranks.device)
        self._ranks = ranks
        layout = ranks.layout
        idle = layout.pp - 1
        self._bubble = idle / (args.gradient_accumulation_steps * layout.vpp + idle)

    def report(self, report: LossReport) -> dict[str, float]:
        """Since the last log; every rank calls this, as memory is that of the fullest."""
        found = {
            "peak_memory_gib": round(groups.largest(peak_memory(self._ranks.device), self._ranks.device), 3)
        }
        if self._bubble:
            found["pipeline_bubble"] = round(self._bubble, 4)
        if report.num_tokens and report.seconds > 0:
            rate = self._flops.of_tokens(report.num_tokens, report.num_samples) / report.seconds
            found["model_tflops"] = float(f"{rate / _TERA:.4g}")
            if self._peak:
                found["mfu"] = float(f"{rate / (self._peak * self._ranks.world_size):.4g}")
        return found
