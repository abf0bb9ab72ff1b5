"""Core attention of the local spec: causal, grouped-query, sliding-window, packed, context-parallel; sinks, soft caps.

Replaces Megatron's ``DotProductAttention``, which stores the full score matrix and supports neither packing nor context
parallelism nor sliding windows. Context parallelism gathers keys and values (backward: reduce-scatter) and each rank
computes its own queries.
"""

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mca_config.errors import McaError
from mca_models.megatron.layers.alibi import add_alibi_channels, alibi_slopes
from mca_models.megatron.layers.sdpa import bidirectional_attention, causal_attention
from mca_models.megatron.layers.sharded import ShardedModule, cut_parameter
from mca_models.megatron.layers.zigzag import gather_full_sequences, rank_token_ranges
from mca_models.megatron.types import AttnMaskType, GroupCollection, MegatronConfig, PackedSeqParams

PACKED_ENDS = "mca_ends"
"""Attribute of ``PackedSeqParams``: boundaries of the sequences as a list of numbers."""
ON_HOST = "mca_on_host"
"""Attribute of ``cu_seqlens`` on a device: the same tensor in host memory."""
_CAUSAL = ("causal", "padding_causal")


@dataclass(frozen=True)
class AttentionOptions:
    """Options of core attention that Megatron's configuration lacks.

    Args:
        softcap: Cap of the scores; see ``causal_attention``.
        temperature: Queries at position p are multiplied by ``1 + beta ln(1 + floor((p + first) / length))``, for
            these ``(beta, length, first)``; None: unscaled.
        temperature_layers: Layers (from 0) with a temperature; None: all.
        chunk: Chunk size; a query attends to keys of its chunk only. None: to all keys before it.
        chunked_layers: Layers (from 0) with chunks.
        alibi: Add ALiBi's bias to the scores.
    """

    softcap: float | None = None
    temperature: tuple[float, int, int] | None = None
    temperature_layers: frozenset[int] | None = None
    chunk: int | None = None
    chunked_layers: frozenset[int] = frozenset()
    alibi: bool = False


class CoreAttention(ShardedModule):
    """softmax(scale * q k^T) v over the keys at or before each query, with the arguments of Megatron's spec."""

    axes: ClassVar = {"softmax_offset": 0}

    options = AttentionOptions()
    reach: int = 0
    """Number of later tokens that an image token may attend to; 0: causal."""
    windowed: bool = False
    """Layers without a sliding window are causal."""

    def __init__(
        self,
        config: MegatronConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: GroupCollection = None,
        **_: object,
    ) -> None:
        super().__init__()
        if config.softmax_type == "off-by-one":
            raise McaError("the local core attention has no softmax_type off-by-one; use transformer_engine")
        if attn_mask_type.name not in _CAUSAL or attention_type != "self":
            raise McaError(
                f"the local core attention is causal self-attention, not {attn_mask_type.name} {attention_type}; "
                "set transformer_impl to transformer_engine"
            )
        self.config = config
        self.scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.window = _window(config, layer_number)
        if self.windowed and self.window is None:
            self.reach = 0
        options, layer = self.options, layer_number - 1
        self.chunk = options.chunk if layer in options.chunked_layers else None
        scaled = options.temperature_layers is None or layer in options.temperature_layers
        self.temperature = options.temperature if scaled else None
        self.cp_group = _context_group(pg_collection)
        self.slopes: Tensor | None
        self.register_buffer("slopes", _slopes(config) if options.alibi else None, persistent=False)
        if config.softmax_type != "vanilla":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = cut_parameter((heads,), config.params_dtype)
        else:
            self.register_parameter("softmax_offset", None)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams = None,
        **_: object,
    ) -> Tensor:
        """Attend; the mask is only used for images, because causal attention never sees padding on the right.

        Args:
            query: ``[q, b, h, d]``, or ``[t, h, d]`` if packed; q or t are this context rank's tokens.
            key: ``[q, b, g, d]`` or ``[t, g, d]``.
            value: ``[q, b, g, dv]`` or ``[t, g, dv]``.
            attention_mask: With bidirectional images ``[b, q]``: how many tokens of its sequence there are up to the
                last that a token attends to; None without images. Ignored for other models.
            attn_mask_type: Ignored: causal.
            attention_bias: Must be None.
            packed_seq_params: Megatron's ``PackedSeqParams``, or None.

        Returns:
            ``[q, b, h * dv]``, or ``[t, h * dv]`` if packed.
        """
        if attention_bias is not None:
            raise McaError("the local core attention has no attention bias; use transformer_engine")
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if packed and query.dim() == 3:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        rows = query.shape[0] * self.cp_group.size()
        lengths = packed_lengths(packed_seq_params, rows) if packed else (rows,)
        out = self._attend(query, key, value, lengths, attention_mask if self.reach else None)
        return out.flatten(1) if packed else out.flatten(2)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], ends: Tensor | None
    ) -> Tensor:
        keys, values = (gather_full_sequences(x, lengths, self.cp_group) for x in (key, value))
        outputs, row = [], 0
        for chunk in rank_token_ranges(lengths, self.cp_group.rank(), self.cp_group.size()):
            for first, start, stop in self._query_ranges(chunk.start, chunk.start + chunk.length):
                queries = slice(row + start - chunk.start, row + stop - chunk.start)
                with self._draws():
                    out = self._attend_queries(
                        _heads_first(self._scale_by_temperature(query[queries], start)),
                        _heads_first(keys[chunk.sequence][first:]),
                        _heads_first(values[chunk.sequence][first:]),
                        start - first,
                        None if ends is None else ends[:, queries],
                    )
                outputs.append(out.permute(2, 0, 1, 3))
            row += chunk.length
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_queries(
        self, query: Tensor, key: Tensor, value: Tensor, start: int, ends: Tensor | None
    ) -> Tensor:
        """Attend with the queries from ``start`` on in a full sequence; heads precede tokens."""
        dropout = self.dropout if self.training else 0.0
        if ends is not None:
            return bidirectional_attention(
                query,
                key,
                value,
                ends,
                start=start,
                reach=self.reach,
                window=self.window,
                scale=self.scale,
                dropout=dropout,
            )
        stop, scale = start + query.shape[2], self.scale
        if self.slopes is not None:
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            query, key = add_alibi_channels(query, key, self.slopes, scale)
        return causal_attention(
            query,
            key[:, :, :stop],
            value[:, :, :stop],
            start=start,
            window=self.window,
            scale=scale,
            dropout=dropout,
            sink=self.softmax_offset,
            softcap=self.options.softcap,
        )

    def _query_ranges(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (first key, first query, end of queries) of each part of the queries ``start .. stop``."""
        size = self.chunk or stop
        for first in range(start - start % size, stop, size):
            yield first, max(start, first), min(stop, first + size)

    def _scale_by_temperature(self, query: Tensor, start: int) -> Tensor:
        """Scale ``[q, b, h, d]`` at positions from ``start`` by their temperature."""
        if self.temperature is None:
            return query
        beta, length, offset = self.temperature
        positions = torch.arange(start + offset, start + offset + len(query), device=query.device)
        factors = 1 + beta * torch.log1p(torch.floor(positions.float() / length))
        return query * factors.to(query.dtype).view(-1, 1, 1, 1)

    def _draws(self) -> AbstractContextManager[None]:
        """Return a context with the random state that tensor ranks do not share, because each has other heads.

        With sequence parallelism Megatron runs whole layers in that state.
        """
        if not self.dropout or not self.training or self.config.sequence_parallel:
            return nullcontext()
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        forked: AbstractContextManager[None] = get_cuda_rng_tracker().fork()
        return forked


@cache
def attention_with_options(options: AttentionOptions) -> type[CoreAttention]:
    """Return a ``CoreAttention`` class with ``options``."""
    return type("AttentionWithOptions", (CoreAttention,), {"options": options})


@cache
def image_attention(reach: int, *, windowed: bool = False) -> type[CoreAttention]:
    """Return a ``CoreAttention`` class with bidirectional attention inside images."""
    return type("ImageAttention", (CoreAttention,), {"reach": reach, "windowed": windowed})


def _heads_first(x: Tensor) -> Tensor:
    """Transpose ``[s, b, h, d]`` to ``[b, h, s, d]``."""
    return x.permute(1, 2, 0, 3)


def _window(config: MegatronConfig, layer_number: int) -> int | None:
    """Return the number of keys that a query of this layer (numbered from 1) sees; None: all."""
    from megatron.core.transformer.utils import is_layer_window_attention

    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    left: int = config.window_size[0]
    return left + 1


def _slopes(config: MegatronConfig) -> Tensor:
    """Return the ALiBi slopes of this tensor rank's heads."""
    from megatron.core import parallel_state

    share = config.num_attention_heads // config.tensor_model_parallel_size
    first = parallel_state.get_tensor_model_parallel_rank() * share
    return alibi_slopes(config.num_attention_heads)[first : first + share]


def _context_group(pg_collection: GroupCollection) -> ProcessGroup:
    from megatron.core import parallel_state

    group: ProcessGroup = (
        parallel_state.get_context_parallel_group() if pg_collection is None else pg_collection.cp
    )
    return group


def set_packed_lengths(packed_seq_params: PackedSeqParams, on_host: Tensor) -> None:
    """Store the boundaries of packed sequences in host memory, so that no layer synchronises with the device.

    Args:
        packed_seq_params: Parameters of the sequences, equal for queries and keys.
        on_host: Their ``cu_seqlens`` in host memory.
    """
    setattr(packed_seq_params, PACKED_ENDS, on_host.tolist())
    setattr(packed_seq_params.cu_seqlens_q, ON_HOST, on_host.detach().clone())


def packed_lengths(packed_seq_params: PackedSeqParams, rows: int) -> tuple[int, ...]:
    """Return the tokens of each packed sequence over all context ranks; trailing rows are one more sequence."""
    ends = list(vars(packed_seq_params).get(PACKED_ENDS) or _read_ends(packed_seq_params))
    if ends[-1] < rows:
        ends.append(rows)
    return tuple(stop - start for start, stop in itertools.pairwise(ends) if stop > start)


def _read_ends(packed_seq_params: PackedSeqParams) -> list[int]:
    """Read the boundaries from the device, which synchronises."""
    ends = packed_seq_params.cu_seqlens_q_padded
    ends = packed_seq_params.cu_seqlens_q if ends is None else ends
    boundaries: list[int] = ends.tolist()
    return boundaries
