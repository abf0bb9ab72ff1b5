"""Lengths of packed sequences are taken from the host's memory where they are known there."""

from types import SimpleNamespace

import torch

from mca_models.megatron import platform
from mca_models.megatron.layers.attention import packed_lengths, set_packed_lengths


def rotated(ends: torch.Tensor) -> torch.Tensor:
    """Three sequences in a row by Megatron's plain rotary embedding."""
    from megatron.core.models.common.embeddings import rope_utils

    generator = torch.Generator().manual_seed(3)
    x = torch.randn(12, 2, 8, generator=generator)
    frequencies = torch.randn(7, 1, 1, 8, generator=generator)
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    found: torch.Tensor = rope_utils._apply_rotary_pos_emb_thd(x, ends, frequencies, cp_group=alone)
    return found


def test_the_embedding_reads_no_lengths_that_the_host_knows() -> None:
    platform.prepare()
    ends = torch.tensor([0, 3, 7, 12], dtype=torch.int32)
    unreadable = torch.tensor(
        [0, 5, 6, 12], dtype=torch.int32
    )  # stands for a GPU's: reading it would be seen
    params = SimpleNamespace(cu_seqlens_q=unreadable)
    expected, other = rotated(ends), rotated(unreadable)
    assert not torch.equal(expected, other)
    set_packed_lengths(params, ends)
    assert torch.equal(rotated(unreadable), expected)
    assert packed_lengths(params, 12) == (3, 4, 5)


def moved(params: SimpleNamespace) -> torch.Tensor:
    """Twelve numbers in a row, each sequence moved on by one."""
    from megatron.core.transformer import multi_token_prediction

    found: torch.Tensor = multi_token_prediction._roll_tensor_packed_seq(torch.arange(12), -1, -1, params)[0]
    return found


def test_prediction_layers_read_no_lengths_that_the_host_knows() -> None:
    platform.prepare()
    unreadable = torch.tensor([0, 5, 6, 12], dtype=torch.int32)  # stands for a GPU's
    params = SimpleNamespace(cu_seqlens_q=unreadable)
    assert moved(params).tolist() == [1, 2, 3, 4, 0, 0, 7, 8, 9, 10, 11, 0]
    set_packed_lengths(params, torch.tensor([0, 3, 7, 12], dtype=torch.int32))
    assert moved(params).tolist() == [1, 2, 0, 4, 5, 6, 0, 8, 9, 10, 11, 0]
    assert params.cu_seqlens_q is unreadable
