"""Transformer Engine's attention on ranks without a GPU: its own checks and choices, its kernels in plain torch.

``DotProductAttention.forward``, its choice of a kernel for an H100 and the checks of context parallelism are its own.
Queries are reported to be in bfloat16, which its kernels want, and are computed in the dtype that they have. Emulated
are the fused kernel and what ranks of a context exchange around it; what cuDNN itself would refuse is not known here.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

CUDNN = (9, 21, 0)


def install() -> dict[Any, Any]:
    """Puts plain torch in the place of kernels; returns functions that are to be exchanged, with their stand-ins."""
    from transformer_engine.pytorch.attention.dot_product_attention import backends, context_parallel, utils
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention as of

    from mca_models.megatron.factory import transformer_config

    of.DotProductAttention.forward = _as_on_a_gpu(of.DotProductAttention.forward)
    backends.FusedAttention.forward = _fused
    for ring in (
        context_parallel.AttnFuncWithCPAndKVP2P,
        context_parallel.AttnFuncWithCPAndKVAllGather,
        context_parallel.AttnFuncWithCPAndQKVOA2A,
    ):
        ring.apply = _over_context_ranks(ring)
    choose, setup = utils.get_attention_backend, transformer_config.Setup
    transformer_config.Setup = lambda **values: setup(
        **values | {"settings": values["settings"] | {"bf16": True}}
    )
    return {
        choose: lambda params: choose(dataclasses.replace(params, qkv_dtype=torch.bfloat16)),
        utils._get_fused_attn_backend: lambda **_: (
            int(backends.FusedAttnBackend["F16_arbitrary_seqlen"]),
            "",
        ),
        utils.get_cudnn_version: lambda: CUDNN,
    }


def _as_on_a_gpu(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forwarded(*args: Any, **kwargs: Any) -> Tensor:
        with mock.patch.object(torch.Tensor, "is_cuda", True):
            return forward(*args, **kwargs)

    return forwarded


def _fused(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    qkv_layout: str,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_mask_type: str,
    window_size: tuple[int, int],
    softmax_offset: Tensor | None,
    core_attention_bias_type: str,
    pad_between_seqs: bool,
    **given: Any,
) -> Tensor:
    """``FusedAttention.forward``: causal attention, over every packed sequence for itself; ``[..., heads * dim]``."""
    from transformer_engine.pytorch.attention.dot_product_attention import context_parallel

    assert "causal" in attn_mask_type and given["attention_mask"] is None and not given["fp8"]
    qkv_format = "thd" if qkv_layout.startswith("t") else "sbhd"
    softmax = {name: getattr(self, name) for name in ("softmax_scale", "softmax_type")}
    softmax["softmax_offset"] = softmax_offset
    group = given["cp_group"]
    if group is None or (not isinstance(group, list) and group.size() == 1):
        lengths = cu_seqlens_q.diff().tolist() if qkv_format == "thd" else [query.shape[0]]
        assert sum(lengths) == query.shape[0] and max(lengths) <= max_seqlen_q
        assert cu_seqlens_q_padded is None
        rows = torch.arange(query.shape[0])
        return _attended(query, key, value, _seen(rows, rows, lengths, window_size), **softmax).flatten(-2)
    out: Tensor = context_parallel.attn_forward_func_with_cp(
        self.training,
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        cu_seqlens_q,
        cu_seqlens_kv,
        max_seqlen_q,
        max_seqlen_kv,
        cu_seqlens_q if cu_seqlens_q_padded is None and qkv_format == "thd" else cu_seqlens_q_padded,
        cu_seqlens_kv if cu_seqlens_kv_padded is None and qkv_format == "thd" else cu_seqlens_kv_padded,
        self.attention_dropout if self.training else 0.0,
        group,
        given["cp_global_ranks"],
        given["cp_stream"],
        given["cp_comm_type"],
        qkv_format=qkv_format,
        attn_mask_type=attn_mask_type,
        attn_bias_type=core_attention_bias_type,
        use_fused_attention=True,
        pad_between_seqs=pad_between_seqs,
        load_balancing_strategy=given["load_balancing_strategy"],
        window_size=window_size,
        **softmax,
    )
    return out.flatten(-2)


def _over_context_ranks(ring: Any) -> Callable[..., Tensor]:
    """``ring.apply`` in plain torch: keys and values of all ranks are gathered for this rank's queries."""
    names = list(inspect.signature(ring.forward).parameters)[1:]
    a2a = "A2A" in ring.__name__

    def apply(*args: Any) -> Tensor:
        from megatron.core.tensor_parallel import mappings

        given = dict(zip(names, args, strict=True))
        q, k, v, group = (given[name] for name in ("q", "k", "v", "cp_group"))
        size, rank = group.size(), group.rank()
        assert given.get("cp_global_ranks") in (None, torch.distributed.get_process_group_ranks(group))
        assert not given["dropout_p"] and not given["fp8"] and given["attn_bias_type"] == "no_bias"
        assert given["attn_mask_type"] == ("padding_causal" if given["qkv_format"] == "thd" else "causal")
        if a2a:
            assert q.shape[-2] % size == 0 and k.shape[-2] % size == 0, "a2a cuts heads over context ranks"
        lengths = _lengths(given, size)
        held = [_held(lengths, size, number) for number in range(size)]
        k, v = (mappings.gather_from_sequence_parallel_region(x, group=group) for x in (k, v))
        offset = given.get("softmax_offset")
        if (
            offset is not None
        ):  # each rank gets the gradient of the whole sequence, as it gathers those of all heads
            offset = mappings.copy_to_tensor_model_parallel_region(offset, group=group)
        seen = _seen(held[rank], torch.cat(held), lengths, given.get("window_size", (-1, 0)))
        return _attended(q, k, v, seen, given["softmax_scale"], given.get("softmax_type", "vanilla"), offset)

    return apply


def _lengths(given: dict[str, Any], size: int) -> list[int]:
    """Tokens of each sequence, over all context ranks."""
    rows = given["q"].shape[0]
    if given["qkv_format"] == "sbhd":
        return [rows * size]
    ends = given["cu_seqlens_q"]
    for name in ("cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        assert torch.equal(given[name], ends), f"{name}: tokens between sequences are not emulated"
    lengths: list[int] = ends.diff().tolist()
    assert max(lengths) <= given["max_seqlen_q"] and sum(lengths) == rows * size
    return lengths


def _held(lengths: Sequence[int], size: int, rank: int) -> Tensor:
    """The tokens of the whole that a rank holds: of 2 x size chunks of each sequence one from either end."""
    held, start = [], 0
    for length in lengths:
        assert length % (2 * size) == 0, f"{length} tokens for {size} context ranks"
        chunks = torch.arange(start, start + length).chunk(2 * size)
        held += [chunks[rank], chunks[-1 - rank]]
        start += length
    return torch.cat(held)


def _seen(mine: Tensor, theirs: Tensor, lengths: Sequence[int], window: tuple[int, int]) -> Tensor:
    """Return the mask of ``theirs`` that each of ``mine`` attends to, by their positions in the full sequence."""
    of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    past = mine[:, None] - theirs[None, :]
    seen = (past >= 0) & (of[mine][:, None] == of[theirs][None, :])
    return seen & (past <= window[0]) if window[0] >= 0 else seen


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    softmax_scale: float,
    softmax_type: str,
    softmax_offset: Tensor | None,
) -> Tensor:
    """Attention of ``[s, b, heads, dim]`` or ``[t, heads, dim]``."""
    if query.dim() == 3:
        batched = (x.unsqueeze(1) for x in (query, key, value))
        return _attended(*batched, seen, softmax_scale, softmax_type, softmax_offset).squeeze(1)
    q, k, v = (x.permute(1, 2, 0, 3).float() for x in (query, key, value))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * softmax_scale).masked_fill(~seen, float("-inf"))
    if softmax_type == "learnable":
        assert softmax_offset is not None
        sink = softmax_offset.float().expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        assert softmax_type == "vanilla"
        weights = scores.softmax(-1)
    return (weights @ v).to(value.dtype).permute(2, 0, 1, 3)
