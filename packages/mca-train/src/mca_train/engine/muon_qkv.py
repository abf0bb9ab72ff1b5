"""Muon's split of fused QKV weights in layers with their own numbers of heads.

Muon orthogonalizes queries, keys and values separately, with the head counts of Megatron's configuration. In a layer
with other head counts that split is wrong.
"""

from collections.abc import Iterable

from mca_train.types import Chunk


def set_muon_qkv_shapes(chunks: Iterable[Chunk]) -> None:
    """Set the split of each such layer's weight to its own rows, after Megatron has built the optimizer."""
    for chunk in chunks:
        for attention in chunk.modules():
            if not hasattr(attention, "qkv_group_rows"):
                continue
            rows, weight = attention.qkv_group_rows(), attention.linear_qkv.weight
            for tensor in (weight, getattr(weight, "main_param", None)):
                if tensor is not None:
                    tensor.is_qkv, tensor.qkv_split_shapes = len(rows) > 1, rows
