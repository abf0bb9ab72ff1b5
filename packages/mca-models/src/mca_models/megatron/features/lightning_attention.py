"""Lightning attention in place of attention (MiniMax-Text-01), chunk by chunk in plain torch.

A state S maps keys to values. Each token decays it by a factor of its head, adds its value and reads it:

    S_t = e^(-r) S_(t-1) + k_t v_t^T      o_t = S_t^T q_t      y = out_proj(sigmoid(gate) * norm(o))

Queries, keys and values are activated by SiLU. The rate r depends on the head and on the layer. Tensor ranks hold
heads; context parallelism gathers the projected tokens.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import Typed
from mca_models.megatron.features.delta_rule import CHUNK, chunks, decay_mask
from mca_models.megatron.features.feature import Feature
from mca_models.megatron.features.norms import FullWidthNorm
from mca_models.megatron.features.recurrent_layers import (
    SequenceMixer,
    mixer_in_layers,
    separate_layer_states,
)
from mca_models.megatron.types import MegatronConfig

_PARTS = ("qkv", "gate")
_EPSILON = 1e-6
"""Epsilon of the output norm, a constant in transformers."""


def decay_rates(heads: int, layer: int, num_layers: int, device: torch.device | None = None) -> Tensor:
    """Return the rate of each head of decoder ``layer``, in fp32: ``[heads]``."""
    rates: Tensor = (1 / 2 ** (8 / heads)) ** (torch.arange(heads, device=device) + 1)
    return rates * (1 - layer / (num_layers - 1 + 1e-5) + 1e-5)


def lightning_attention(query: Tensor, key: Tensor, value: Tensor, rates: Tensor) -> Tensor:
    """Compute the outputs of all tokens from a zero state.

    Args:
        query: ``[b, h, s, d]``.
        key: ``[b, h, s, d]``.
        value: ``[b, h, s, d]``.
        rates: Rates of decay, ``[h]``.

    Returns:
        ``[b, h, s, d]`` in the dtype of ``value``; computed in fp32.
    """
    length, dtype = query.shape[2], torch.promote_types(value.dtype, torch.float32)
    q, k, v = (chunks(x.to(dtype)) for x in (query, key, value))
    log_decay = -rates.to(dtype)[:, None] * torch.arange(1, CHUNK + 1, device=q.device)  # [h, CHUNK]
    within = (q @ k.mT * decay_mask(log_decay)[:, None]) @ v
    read = q * log_decay.exp()[:, None, :, None]
    added = (k * (log_decay[:, -1:] - log_decay).exp()[:, None, :, None]).mT @ v
    last = log_decay[:, -1].exp()[:, None, None]
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    outputs = []
    for i in range(q.shape[2]):
        outputs.append(within[:, :, i] + read[:, :, i] @ state)
        state = last * state + added[:, :, i]
    return torch.cat(outputs, 2)[:, :, :length].to(value.dtype)


class _GateNorm(FullWidthNorm):
    """Norm across all heads of the outputs."""

    def __init__(self, config: MegatronConfig, heads: int, channels: int) -> None:
        super().__init__(config, channels, _EPSILON)
        assert self.width == heads * channels, "lightning attention has the heads of attention"
        torch.nn.init.ones_(self.weight)


class LightningAttention(SequenceMixer):
    """Lightning attention of one tensor rank's heads; `mixer_spec` mixes in ``MegatronModule``."""

    def __init__(
        self, config: MegatronConfig, model: McaModelConfig, column: Typed, row: Typed, **options: Typed
    ) -> None:
        super().__init__(config)
        self.groups = options["pg_collection"]
        sizes = given(model.lightning_attention)
        heads, self.channels = sizes.lightning_num_heads, sizes.lightning_head_dim
        width = heads * self.channels
        self.heads = heads // self.groups.tp.size()
        self.in_proj, self.out_proj = self._projections(column, row, rows=4 * width, inside=width)
        self.gate_norm = _GateNorm(config, heads, self.channels)
        share = self.heads * self.channels
        self.fused = {"in_proj.weight": ([3 * share, share], _PARTS)}
        self._layer = options["layer_number"] - 1, model.num_layers

    def _sequence(self, mixed: Tensor) -> Tensor:
        """Map projections ``[s, b, q k v of each head, gates]`` of one sequence to gated values ``[s, b, v]``."""
        share = self.heads * self.channels
        qkv, gate = mixed.split([3 * share, share], -1)
        parts = silu(qkv).unflatten(-1, (self.heads, 3, self.channels)).permute(3, 1, 2, 0, 4)
        outputs = lightning_attention(parts[0], parts[1], parts[2], self._rates(mixed.device))
        normal = self.gate_norm(outputs.permute(2, 0, 1, 3)).flatten(-2)
        gated: Tensor = gate.sigmoid() * normal
        return gated

    def _rates(self, device: torch.device) -> Tensor:
        """Return the rates of this rank's heads; a buffer would be rounded in a model of half precision."""
        ranks, rank = self.groups.tp.size(), self.groups.tp.rank()
        return decay_rates(ranks * self.heads, *self._layer, device).narrow(0, rank * self.heads, self.heads)


LIGHTNING_ATTENTION = Feature(
    name="lightning attention",
    enabled=lambda config: config.lightning_attention is not None,
    settings=separate_layer_states,
    layer=mixer_in_layers("lightning", LightningAttention, norm=False),
)
