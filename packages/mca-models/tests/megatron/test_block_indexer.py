"""An indexer of blocks chooses the keys that transformers' chooses, for any part of the queries and of the groups."""

import pytest
import torch
import transformers
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
    MiniMaxM3VLIndexer,
    MiniMaxM3VLRotaryEmbedding,
)

from mca_models.megatron.features.block_sparse_attention import BlockIndexer, BlockSizes

LENGTH, BATCH, HIDDEN = 22, 3, 32


@pytest.mark.parametrize(("topk", "local"), [(3, 1), (3, 0), (2, 2), (9, 1)])
def test_it_chooses_the_keys_that_transformers_chooses(topk: int, local: int) -> None:
    config = transformers.AutoConfig.for_model(
        "minimax_m3_vl_text",
        **{"hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        **{"index_n_heads": 2, "index_head_dim": 10, "index_block_size": 4, "rms_norm_eps": 1e-3},
        **{"index_topk_blocks": topk, "index_local_blocks": local, "partial_rotary_factor": 0.5},
    )
    torch.manual_seed(0)
    theirs, rope = MiniMaxM3VLIndexer(config, 0), MiniMaxM3VLRotaryEmbedding(config)
    sizes = BlockSizes(
        groups=2, channels=10, hidden=HIDDEN, size=4, topk=topk, local=local, epsilon=1e-3, offset=1.0
    )
    ours = BlockIndexer(sizes, rope.inv_freq, 1.0, torch.float32)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            ours.get_submodule(name.removesuffix(".weight")).weight.copy_(weight.normal_(0, 0.3))
    hidden, places = torch.randn(BATCH, LENGTH, HIDDEN), torch.arange(LENGTH)
    of_rows = places.expand(BATCH, -1)
    chosen = theirs(hidden, rope(hidden, of_rows), None, of_rows)
    mask = theirs.build_block_mask(chosen, None, LENGTH, torch.float32, hidden.device, of_rows) == 0
    hidden = hidden.transpose(0, 1)
    keys = ours.keys(hidden, places)
    for start, stop, groups in ((0, LENGTH, slice(0, 2)), (5, 13, slice(1, 2)), (20, 22, slice(0, 1))):
        queries = ours.queries(hidden[start:stop], places[start:stop], groups)
        found = ours.select(queries, keys[:stop], start)
        assert torch.equal(found, mask[:, ::2][:, groups, start:stop, :stop])  # two heads have a choice
    assert not list(ours.parameters())  # it is not trained
