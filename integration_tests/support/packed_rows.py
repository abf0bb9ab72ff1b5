"""Rows that are packed into one, or computed one after the other, and what differs."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from cases import Case, group_by_ranks
from harness import run_ranks
from layouts import arguments
from reference import Reference, make_reference, model_for

LENGTHS = (8, 16, 4)


def packed(models: Any, rows: list[torch.Tensor]) -> torch.Tensor:
    """The logits of ``rows`` packed into one, this rank's context part, and all of the vocabulary."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from mca_models.megatron import platform
    from mca_models.megatron.distributed import parallel
    from mca_models.megatron.layers.zigzag import take_rank_tokens

    group, device = parallel.context_group(), platform.current_device()
    ends = torch.tensor([0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()], dtype=torch.int32)
    ends = ends.to(device)
    longest = max(len(row) for row in rows)
    ids = torch.cat([take_rank_tokens(row, 0, group.rank(), group.size()) for row in rows])[None].to(device)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    chunk: Any = models.chunks[0]
    positions = torch.zeros_like(ids)
    return chunk(input_ids=ids, position_ids=positions, attention_mask=None, packed_seq_params=params)


def logits_and_gradient(
    models: Any, rows: list[torch.Tensor], together: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's logits, and the gradient of their squares for the first output projection."""
    models.eval()
    models.zero_grad()
    logits = packed(models, rows) if together else torch.cat([packed(models, [row]) for row in rows], 1)
    logits.float().pow(2).sum().backward()
    mixer = models.chunks[0].decoder.layers[-1].self_attention
    projection = mixer.linear_proj if hasattr(mixer, "linear_proj") else mixer.out_proj
    return logits.detach(), projection.weight.grad.clone()


def compare(reference: Reference, layout: str, **settings: Any) -> tuple[float, float, float]:
    """Differences of packed and separate logits, of gradients, and to transformers."""
    from mca_models.megatron import AutoModel

    models = AutoModel.from_pretrained(reference.path, arguments(layout, **settings))
    rows = [reference.input_ids[i, :length] for i, length in enumerate(LENGTHS)]
    one, one_grad = logits_and_gradient(models, rows, together=True)
    many, many_grad = logits_and_gradient(models, rows, together=False)
    whole = max(
        float((models.logits(row[None]).cpu() - reference.logits[i, : len(row)]).abs().max())
        for i, row in enumerate(rows)
    )
    scale = float(many_grad.abs().max())
    return float((one - many).abs().max()), float((one_grad - many_grad).abs().max()) / scale, whole


def compare_all(cases: dict[Case, Reference]) -> dict[Case, tuple[float, float, float]]:
    """Return `compare` of each case. Runs on every rank."""
    return {case: compare(reference, case.layout) for case, reference in cases.items()}


def compare_on_ranks(cases: Iterable[Case], folder: Path) -> dict[Case, tuple[float, float, float]]:
    """Return the largest result of `compare` over all ranks, for each case."""
    found = {}
    for num_ranks, group in group_by_ranks(cases).items():
        references = {case: make_reference(model_for(case), folder) for case in group}
        ranks = run_ranks(num_ranks, compare_all, references, timeout=300)
        for case in group:
            one, gradient, whole = (
                max(values) for values in zip(*(rank[case] for rank in ranks), strict=True)
            )
            found[case] = one, gradient, whole
    return found
