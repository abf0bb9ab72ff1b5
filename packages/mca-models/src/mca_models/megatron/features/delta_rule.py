"""Gated delta rule, chunk by chunk, in plain torch or by the kernels of flash-linear-attention.

A state S maps keys to values. Each token decays the state, corrects its value for the token's key, and reads it:

    S_t = e^(g_t) S_(t-1) + k_t u_t^T      u_t = b_t (v_t - (e^(g_t) S_(t-1))^T k_t)      o_t = S_t^T q_t

The decay e^(g_t) is a number, or one for each channel of the key. Within a chunk that begins with state S, with G_i
the sum of g up to token i, the corrections solve

    (I + A) U = diag(b) (V - (e^G K) S)      A_ij = b_i sum_c k_ic e^(G_ic - G_jc) k_jc  for j < i

so that only the states between chunks are computed sequentially.
"""

from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from mca_models.megatron.features.kernels import Kernel

CHUNK = 64
_BLOCK = 16
"""Tokens of a chunk whose per-channel decay is computed pair by pair."""


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, kernel: Kernel | None
) -> Tensor:
    """Compute the outputs of all tokens from a zero state; queries and keys are L2-normalized first.

    Args:
        query: ``[b, s, key heads, dk]``; scaled here.
        key: ``[b, s, key heads, dk]``; repeated to the number of value heads.
        value: ``[b, s, heads, dv]``.
        decay: ``[b, s, heads]``, or with ``dk`` at its end; fp32.
        beta: ``[b, s, heads]``.
        kernel: ``chunk_gated_delta_rule`` or ``chunk_kda``; None: plain torch.

    Returns:
        ``[b, s, heads, dv]``.
    """
    repeats = value.shape[2] // key.shape[2]
    if kernel is not None:
        query, key = (x.repeat_interleave(repeats, 2) for x in (query, key))
        gates = {"g": decay.contiguous(), "beta": beta.contiguous()}
        out = kernel(*(x.contiguous() for x in (query, key, value)), **gates, use_qk_l2norm_in_kernel=True)
        return cast(tuple[Tensor, object], out)[0]
    query, key = (_unit(x).repeat_interleave(repeats, 2) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    return gated_delta_rule(*(x.transpose(1, 2) for x in (query, key, value, decay, beta))).transpose(1, 2)


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Compute the outputs of all tokens from a zero state.

    Args:
        query: ``[b, h, s, dk]``; scaled by the caller.
        key: ``[b, h, s, dk]``.
        value: ``[b, h, s, dv]``.
        decay: ``[b, h, s]`` or ``[b, h, s, dk]``, log of the factor on the state (g above): at most 0.
        beta: ``[b, h, s]``, share of the correction that is applied.

    Returns:
        ``[b, h, s, dv]`` in the dtype of ``value``; computed in fp32.
    """
    length, dtype = query.shape[2], torch.promote_types(value.dtype, torch.float32)
    decay = decay if decay.dim() == 4 else decay.unsqueeze(-1)
    q, k, v, log_decay, b = (chunks(x.to(dtype)) for x in (query, key, value, decay, beta.unsqueeze(-1)))
    log_decay = log_decay.cumsum(-2)  # G
    read, products = _pairs((q, k), k, log_decay)
    system = torch.eye(CHUNK, dtype=dtype, device=q.device) + (b * products).tril(-1)
    right = torch.cat([b * v, b * log_decay.exp() * k], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, seen = solved.split([v.shape[-1], k.shape[-1]], -1)
    last = log_decay[..., -1:, :]
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    outputs = []
    for i in range(q.shape[2]):
        corrections = new[:, :, i] - seen[:, :, i] @ state  # U
        outputs.append((q[:, :, i] * log_decay[:, :, i].exp()) @ state + read[:, :, i] @ corrections)
        update = (k[:, :, i] * (last[:, :, i] - log_decay[:, :, i]).exp()).mT @ corrections
        state = last[:, :, i].exp().mT * state + update
    out: Tensor = torch.cat(outputs, 2)[:, :, :length].to(value.dtype)
    return out


def _pairs(left: tuple[Tensor, ...], right: Tensor, log_decay: Tensor) -> list[Tensor]:
    """Return ``sum_c x_ic e^(G_ic - G_jc) y_jc`` for each x of ``left`` and j <= i, else 0: ``[..., CHUNK, CHUNK]``."""
    if log_decay.shape[-1] == 1:
        decays = decay_mask(log_decay[..., 0])
        return [(x @ right.mT) * decays for x in left]
    rows: list[list[Tensor]] = [[] for _ in left]
    for start in range(0, CHUNK, _BLOCK):
        block_rows = slice(start, start + _BLOCK)
        first = log_decay[..., start : start + 1, :]
        within_block = _decay_mask(log_decay[..., block_rows, :]) * right[..., None, block_rows, :]
        # relative to the start of the block, so that no exponent is above 0
        far = right[..., :start, :] * (first - log_decay[..., :start, :]).exp()
        since = (log_decay[..., block_rows, :] - first).exp()
        for x, row in zip(left, rows, strict=True):
            block = x[..., block_rows, :]
            within = (within_block @ block.unsqueeze(-1)).squeeze(-1)
            later = block.new_zeros(*block.shape[:-1], CHUNK - start - _BLOCK)
            row.append(torch.cat([(block * since) @ far.mT, within, later], -1))
    return [torch.cat(row, -2) for row in rows]


def chunks(x: Tensor) -> Tensor:
    """Split ``[b, h, s, d]`` into ``[b, h, chunks, CHUNK, d]``; padding tokens of zeros change nothing."""
    split: Tensor = pad(x, (0, 0, 0, -x.shape[2] % CHUNK)).unflatten(2, (-1, CHUNK))
    return split


def decay_mask(log_decay: Tensor) -> Tensor:
    """Return ``e^(G_i - G_j)`` for j <= i, else 0 (masked before the exponential, which would overflow)."""
    return _decay_mask(log_decay.unsqueeze(-1))[..., 0]


def _decay_mask(log_decay: Tensor) -> Tensor:
    """Return the decay of ``[..., tokens, channels]``; see `decay_mask`."""
    difference, count = log_decay.unsqueeze(-2) - log_decay.unsqueeze(-3), log_decay.shape[-2]
    later = torch.ones(count, count, dtype=torch.bool, device=log_decay.device).triu(1)
    return difference.masked_fill(later.unsqueeze(-1), float("-inf")).exp()


def _unit(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)
