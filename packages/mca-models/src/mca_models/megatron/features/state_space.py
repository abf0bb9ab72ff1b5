"""Selective state space (Mamba 2), chunk by chunk, in plain torch.

A head's state S accumulates each token's inputs along B and is read along C, with a decay per token:

    S_t = e^(a_t) S_(t-1) + B_t x_t^T      y_t = S_t^T C_t

Within a chunk that begins with state S, with G_i the sum of a up to token i,

    Y = ((C B^T) * F) X + diag(e^G) C S      F_ij = e^(G_i - G_j) for j <= i

so that only the states between chunks are computed sequentially. B and C are shared by a group of heads.
"""

import torch
from torch import Tensor

from mca_models.megatron.features.delta_rule import chunks, decay_mask
from mca_models.megatron.features.kernels import Kernel

_KERNELS_CHUNK = 256
"""Chunk size of the kernel."""


def state_space_layer(
    x: Tensor, step: Tensor, rate: Tensor, into: Tensor, read: Tensor, skip: Tensor, kernel: Kernel | None
) -> Tensor:
    """Compute a layer's outputs from inputs scaled by their time steps, with the skip connection D.

    Args:
        x: ``[b, s, h, p]``.
        step: ``[b, s, h]``, fp32, at least 0.
        rate: ``[h]``, fp32, below 0: decay rate of a head's state.
        into: ``[b, s, g, n]``, B of each group of heads.
        read: ``[b, s, g, n]``, C.
        skip: ``[h]``, fp32: D, the factor of the skip connection.
        kernel: ``mamba_chunk_scan_combined``; None: plain torch.

    Returns:
        ``[b, s, h, p]`` in fp32.
    """
    if kernel is not None:
        arguments = (part.contiguous() for part in (x, step, rate, into, read))
        out = kernel(*arguments, chunk_size=_KERNELS_CHUNK, D=skip)
        assert isinstance(out, Tensor)
        return out.float()
    x = x.float()
    inputs, into, read = (part.transpose(1, 2) for part in (x * step.unsqueeze(-1), into, read))
    out = state_space(inputs, (rate * step).transpose(1, 2), into, read).transpose(1, 2)
    return out + skip[:, None] * x


def state_space(inputs: Tensor, decay: Tensor, into: Tensor, read: Tensor) -> Tensor:
    """Compute the outputs of all tokens from a zero state.

    Args:
        inputs: ``[b, h, s, p]``, x above.
        decay: ``[b, h, s]``, log of the factor on the state (a above): at most 0.
        into: ``[b, g, s, n]``, B of each group of heads.
        read: ``[b, g, s, n]``, C.

    Returns:
        ``[b, h, s, p]`` in fp32.
    """
    length, groups = inputs.shape[2], into.shape[1]
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    x = chunks(inputs.to(dtype)).unflatten(1, (groups, -1))  # [b, g, heads, chunks, CHUNK, p]
    log_decay = chunks(decay.to(dtype).unsqueeze(-1)).cumsum(-2).unflatten(1, (groups, -1))  # G
    b, c = (chunks(part.to(dtype)).unsqueeze(2) for part in (into, read))  # the same for each head of a group
    last = log_decay[..., -1:, :]
    within = ((c @ b.mT) * decay_mask(log_decay.squeeze(-1))) @ x
    added = ((last - log_decay).exp() * b).mT @ x  # what a chunk adds to the state
    state = torch.zeros_like(added[..., 0, :, :])
    before = []
    for i in range(x.shape[3]):
        before.append(state)
        state = last[..., i, :, :].exp() * state + added[..., i, :, :]
    out = within + (log_decay.exp() * c) @ torch.stack(before, 3)
    whole: Tensor = out.flatten(1, 2).flatten(2, 3)[:, :, :length]
    return whole
