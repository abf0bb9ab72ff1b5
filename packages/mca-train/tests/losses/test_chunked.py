"""Losses that cannot be computed in chunks."""

from types import SimpleNamespace

import pytest

from mca_config.errors import McaError
from mca_train.losses.chunked import chunk_losses


@pytest.mark.parametrize(
    ("depth", "wants_logits", "message"),
    [
        (0, True, "loss_chunk_size is not supported with wants_logits"),
        (1, False, "loss_chunk_size is not supported with MTP layers"),
    ],
)
@pytest.mark.parametrize("has_loss", [False, True])
def test_whole_logits_are_refused_on_every_stage(depth, wants_logits, message, has_loss):
    chunk = SimpleNamespace(config=SimpleNamespace(mtp_num_layers=depth), post_process=has_loss)
    with pytest.raises(McaError, match=message):
        chunk_losses([chunk], 8, wants_logits=wants_logits)
    chunk_losses([chunk], None, wants_logits=wants_logits)


def test_prediction_layers_are_refused_where_nothing_would_train_them():
    chunk = SimpleNamespace(config=SimpleNamespace(mtp_num_layers=1), post_process=False)
    with pytest.raises(McaError, match="wants_logits is not supported with MTP layers"):
        chunk_losses([chunk], None, wants_logits=True)
