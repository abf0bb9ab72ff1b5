"""Losses that are computed in chunks, and those that cannot be."""

from types import SimpleNamespace

import pytest
from torch.nn import Linear

from mca_config.errors import McaError
from mca_models.megatron.log_probs.vocabulary import TokenValues
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


def chunk_with_loss():
    return SimpleNamespace(
        config=SimpleNamespace(mtp_num_layers=0),
        post_process=True,
        output_layer=Linear(2, 3),
        compute_language_model_loss=lambda labels, logits: (labels, logits),
        _postprocess=lambda **_: "full logits",
    )


@pytest.mark.parametrize(
    ("tokens", "values", "expected"), [(8, None, 8), (8, TokenValues(), 8), (None, TokenValues(), 1024)]
)
def test_chunks_compute_the_models_loss_or_the_values_asked_for(tokens, values, expected):
    chunk = chunk_with_loss()
    plain = chunk._postprocess
    chunk_losses([chunk], tokens, wants_logits=False, values=values, vocab_size=3)
    found = chunk._postprocess
    assert found._tokens == expected
    assert (found._values is chunk.compute_language_model_loss) == (values is None)
    assert found._plain is plain

