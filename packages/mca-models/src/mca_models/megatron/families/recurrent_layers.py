"""Layers that carry a state from token to token see whole sequences, whatever a context rank holds of them.

What such a layer computes of a sequence is its own matter.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import conv1d, pad, silu

from mca_models.megatron.families.kernels import Kernel
from mca_models.megatron.layers.zigzag import rank_token_ranges, restore_token_order
from mca_models.megatron.types import PackedSeqParams

_WIDEST = 4
"""Tokens that the kernel of a convolution reaches, itself included."""


def apply_to_full_sequences(
    compute: Callable[[Tensor], Tensor], x: Tensor, packed_seq_params: PackedSeqParams, group: ProcessGroup
) -> Tensor:
    """``compute`` of every whole sequence, of which each context rank keeps its own tokens.

    Args:
        compute: From ``[s, b, ...]``, one sequence, to as many tokens.
        x: ``[s / cp, b, ...]``; packed sequences, if so, one after the other.
        packed_seq_params: Where packed sequences begin.
        group: The context ranks, over which the sequences are gathered.
    """
    lengths = _lengths(packed_seq_params, x.shape[0] * group.size())
    outputs = [compute(sequence) for sequence in _sequences(x, lengths, group)]
    chunks = rank_token_ranges(lengths, group.rank(), group.size())
    own = [outputs[chunk.sequence].narrow(0, chunk.start, chunk.length) for chunk in chunks]
    return own[0] if len(own) == 1 else torch.cat(own)


class CausalConvolution(torch.nn.Conv1d):
    """Each channel mixed with its past, and activated.

    It is a module that is called, because Megatron waits for parameters that are gathered during a step
    (``overlap_param_gather``) when the module that owns them is called.
    """

    kernel: Kernel | None

    @classmethod
    def from_conv1d(cls, convolution: torch.nn.Conv1d, kernel: Kernel | None) -> "CausalConvolution":
        """One with the parameters of ``convolution``; ``kernel`` is ``causal_conv1d_fn`` or None, plain torch."""
        channels, (width,) = convolution.out_channels, convolution.kernel_size
        found = cls(channels, channels, width, groups=channels, bias=False, device="meta")
        found.weight, found.bias, found.kernel = convolution.weight, convolution.bias, kernel
        return found

    def forward(self, x: Tensor) -> Tensor:
        """``[b, channels, s]`` to the same."""
        width = self.weight.shape[-1]
        if self.kernel is not None and width <= _WIDEST:
            mixed = self.kernel(x.contiguous(), self.weight.squeeze(1), self.bias, activation="silu")
            assert isinstance(mixed, Tensor)
            return mixed
        return silu(conv1d(pad(x, (width - 1, 0)), self.weight, self.bias, groups=x.shape[1]))


def _sequences(x: Tensor, lengths: tuple[int, ...], group: ProcessGroup) -> list[Tensor]:
    """Every whole sequence ``[s, b, ...]``, gathered over the context ranks."""
    rows = x if x.dim() == 3 else x.unsqueeze(1)
    if group.size() == 1:
        return list(torch.split(rows, list(lengths)))
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    return restore_token_order(gather_from_sequence_parallel_region(rows, group=group), lengths, group.size())


def _lengths(packed_seq_params: PackedSeqParams, rows: int) -> tuple[int, ...]:
    if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
        return (rows,)
    from mca_models.megatron.layers.attention import packed_lengths

    return packed_lengths(packed_seq_params, rows)
