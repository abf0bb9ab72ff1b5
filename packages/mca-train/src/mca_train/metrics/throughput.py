"""Device utilization of a run: model FLOP/s, MFU, memory, and the pipeline bubble.

Model FLOP, forward and backward: ``6 x weights`` for each token and ``6 x layers x heads x head size x length^2`` for
each sequence. The weights are all matrices that multiply a token: without the embedding, with the experts' share that
the router picks, and the output layer again for each MTP layer. The second part is causal attention, which attends to
half the sequence on average; each layer counts its own heads, whose size is the mean of keys' and values'. Frozen
weights, with an adapter or ``freeze``, count 4 times, as they get no gradient. Recomputation and the reference model of
preference tuning do not count. Sliding windows and linear attention count as full attention, state space layers only by
their weights.
MFU is model FLOP/s divided by ranks x peak.
"""

import re
import resource
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from mca_config.model_config import DtypeName, McaModelConfig
from mca_models.templates.parts.layer_costs import ExpertSizes
from mca_models.templates.parts.mla import latent_sizes
from mca_models.templates.parts.moe import expert_sizes
from mca_models.templates.shapes import full_shape
from mca_models.weights import Param, Stage
from mca_train import groups
from mca_train.config.model_parts import trained_parts
from mca_train.groups import Ranks
from mca_train.metrics.meters import LossReport
from mca_train.plan.counts import adapter_shapes, model_params
from mca_train.types import TrainingArguments, VirtualModels

if TYPE_CHECKING:
    from mca_models.lora.rules import AdapterRules

PEAK_TFLOPS = {
    "GB300": 2500.0,
    "GB200": 2500.0,
    "B300": 2250.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H20": 148.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10G": 70.0,
    "V100": 125.0,
}
"""Dense bf16 (V100: fp16) peaks from NVIDIA's data sheets, by words of the device name; the first match wins."""

_TERA = 1e12
_GIB = 1024**3


@dataclass(frozen=True)
class ModelFlops:
    """FLOP of a training step's tokens.

    Args:
        per_token: Of the weights.
        per_square: Of attention; times the square of a sequence's length.
    """

    per_token: float
    per_square: float

    @classmethod
    def from_config(
        cls, config: McaModelConfig, adapter: "AdapterRules | None" = None, *, frozen: bool = False
    ) -> "ModelFlops":
        """Count the FLOP from the model's parameters.

        Args:
            config: The model.
            adapter: Rules of the adapter that is trained instead of the full model.
            frozen: True if only the vision model is trained.
        """
        saved = () if adapter is None else adapter.saved
        trained = {param.mca_name() for param in saved} if frozen or adapter is not None else None
        per_token, depth, moe = 0.0, config.mtp_num_layers or 0, expert_sizes(config)
        for param in model_params(config):
            shape, name = full_shape(param, config), param.mca_name()
            table = name.startswith("embedding.") and name.endswith("_embeddings.weight")
            if len(shape) < 2 or table or param.stage is Stage.VISION:
                continue
            times = 1 + depth * (name == "output_layer.weight")
            passes = 6 if trained is None or name in trained else 4
            per_token += passes * times * prod(shape) * _share(param, moe)
        for param, shape in () if adapter is None else adapter_shapes(config, adapter.factors):
            per_token += 6 * prod(shape) * _share(param, moe)
        squared = [
            config.layer_config(layer)
            for layer in range(config.num_layers)
            if config.has_attention(layer) and (config.is_linear_layer(layer) or not config.has_mixer(layer))
        ]
        squared += [config] * depth
        return cls(
            per_token, 6.0 * sum(layer.attention.num_attention_heads * _width(layer) for layer in squared)
        )

    def for_tokens(self, tokens: int, squares: int) -> float:
        """Return the FLOP of ``tokens`` in sequences whose squared lengths sum to ``squares``."""
        return tokens * self.per_token + squares * self.per_square


def _share(param: Param, moe: ExpertSizes | None) -> float:
    """Return the fraction of tokens that a weight multiplies."""
    return 1.0 if param.expert is None or moe is None else moe.topk / moe.choices


def _width(config: McaModelConfig) -> float:
    """Return the size of a head, the mean of keys and values."""
    if (latent := latent_sizes(config)) is not None:
        return (latent.query + latent.value) / 2
    return (config.attention.kv_channels + config.attention.value_width) / 2


def peak_flops(args: TrainingArguments, dtype: DtypeName, device: torch.device) -> float | None:
    """Return the peak of one device: ``peak_tflops``, else a known GPU's in half precision, else None."""
    configured = getattr(args, "peak_tflops", None)
    if configured:
        return float(configured) * _TERA
    if device.type != "cuda" or dtype == "float32":
        return None
    name = torch.cuda.get_device_name(device)
    known = (peak for words, peak in PEAK_TFLOPS.items() if re.search(rf"\b{words}\b", name))
    peak = next(known, None)
    return None if peak is None else peak * _TERA


def peak_memory(device: torch.device) -> float:
    """Return the peak GiB of this rank's GPU, or of the process without a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB


class Throughput:
    """Log entries about speed besides tokens and samples per second.

    Args:
        args: Training arguments.
        model: `VirtualModels`, with or without an adapter.
        ranks: This rank.
    """

    def __init__(self, args: TrainingArguments, model: VirtualModels, ranks: Ranks) -> None:
        frozen = model.config.vision is not None and "language" not in trained_parts(args, model.config)
        self._flops = ModelFlops.from_config(model.config, getattr(model, "rules", None), frozen=frozen)
        self._peak = peak_flops(args, model.config.dtype, ranks.device)
        self._ranks = ranks
        self._bubble = ranks.layout.bubble(args.gradient_accumulation_steps)

    def report(self, report: LossReport) -> dict[str, float]:
        """Return the entries since the last log; every rank calls this, as memory is the maximum over ranks."""
        logs = {
            "peak_memory_gib": round(
                groups.max_over_ranks(peak_memory(self._ranks.device), self._ranks.device), 3
            )
        }
        if self._bubble:
            logs["pipeline_bubble"] = round(self._bubble, 4)
        if report.num_tokens and report.seconds > 0:
            rate = self._flops.for_tokens(report.num_tokens, report.squares) / report.seconds
            logs["model_tflops"] = float(f"{rate / _TERA:.4g}")
            if self._peak:
                logs["mfu"] = float(f"{rate / (self._peak * self._ranks.world_size):.4g}")
        return logs
