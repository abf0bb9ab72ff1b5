"""Muon makes queries, keys and values orthogonal one by one, by the heads that Megatron takes all layers to have.

So it splits the fused weight of a layer with heads of its own at rows that mean nothing, if their number allows it.
"""

from collections.abc import Iterable

from mca_train.types import Chunk


def split_own_heads(chunks: Iterable[Chunk]) -> None:
    """Has such weights be split at their own rows; after Megatron has made the optimizer."""
    for chunk in chunks:
        for attention in chunk.modules():
            if not hasattr(attention, "qkv_group_rows"):
                continue
            rows, weight = attention.qkv_group_rows(), attention.linear_qkv.weight
            for tensor in (weight, getattr(weight, "main_param", None)):
                if tensor is not None:
                    tensor.is_qkv, tensor.qkv_split_shapes = len(rows) > 1, rows
