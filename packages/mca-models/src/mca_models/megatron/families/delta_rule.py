"""The gated delta rule, chunk by chunk, in plain torch.

A state S maps keys to values. Each token lets it fade, corrects what it says of the token's key, and reads it:

    S_t = e^(g_t) S_(t-1) + k_t u_t^T      u_t = b_t (v_t - e^(g_t) S_(t-1)^T k_t)      o_t = S_t^T q_t

Within a chunk that begins with state S, with G_i the sum of g up to token i, the corrections solve

    (I + A) U = diag(b) (V - diag(e^G) K S)      A_ij = b_i e^(G_i - G_j) k_i . k_j  for j < i

so that only the states between chunks are computed one after the other.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The outputs of all tokens, from a state of zeros.

    Args:
        query: ``[b, h, s, dk]``; scaled by the caller.
        key: ``[b, h, s, dk]``.
        value: ``[b, h, s, dv]``.
        decay: ``[b, h, s]``, log of the factor on the state (g above): at most 0.
        beta: ``[b, h, s]``, how much of the correction is made.

    Returns:
        ``[b, h, s, dv]`` in the dtype of ``value``; computed in fp32.
    """
    length, dtype = query.shape[2], torch.promote_types(value.dtype, torch.float32)
    q, k, v = (chunks(x.to(dtype)) for x in (query, key, value))
    faded, b = (chunks(x.to(dtype).unsqueeze(-1)) for x in (decay, beta))
    faded = faded.cumsum(-2)  # G
    fades = fading(faded.squeeze(-1))
    system = torch.eye(CHUNK, dtype=dtype, device=q.device) + (b * (k @ k.mT) * fades).tril(-1)
    right = torch.cat([b * v, b * faded.exp() * k], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, seen = solved.split([v.shape[-1], k.shape[-1]], -1)
    read, last = (q @ k.mT) * fades, faded[..., -1:, :]
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    outputs = []
    for i in range(q.shape[2]):
        corrections = new[:, :, i] - seen[:, :, i] @ state  # U
        outputs.append((q[:, :, i] * faded[:, :, i].exp()) @ state + read[:, :, i] @ corrections)
        kept = (k[:, :, i] * (last[:, :, i] - faded[:, :, i]).exp()).mT @ corrections
        state = last[:, :, i].exp() * state + kept
    out: Tensor = torch.cat(outputs, 2)[:, :, :length].to(value.dtype)
    return out


def chunks(x: Tensor) -> Tensor:
    """``[b, h, s, d]`` as ``[b, h, chunks, CHUNK, d]``; tokens of zeros at the end change nothing."""
    chunks: Tensor = pad(x, (0, 0, 0, -x.shape[2] % CHUNK)).unflatten(2, (-1, CHUNK))
    return chunks


def fading(faded: Tensor) -> Tensor:
    """``e^(G_i - G_j)`` for j <= i, else 0 (masked before the exponential, which would overflow)."""
    difference = faded.unsqueeze(-1) - faded.unsqueeze(-2)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=faded.device).triu(1)
    return difference.masked_fill(later, float("-inf")).exp()
