"""Losses in chunks of tokens: the chunk that computes them, and those that cannot be computed so."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_config.errors import McaError
from mca_models.megatron.log_probs.chunks import ChunkedOutput
from mca_train.losses.loss_inputs import chunk_losses


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


class Chunk:
    """A chunk whose output layer is two linears, of which one fuses its gradients."""

    def __init__(self, *, post_process: bool = True) -> None:
        self.config = SimpleNamespace(mtp_num_layers=None)
        self.post_process = post_process
        self.output_layer: Any = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
        self.output_layer[1].gradient_accumulation_fusion = True

    def _postprocess(self) -> None: ...

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits.sum(-1)


def test_the_last_chunk_computes_its_loss_on_as_many_tokens_as_are_set() -> None:
    first, last = Chunk(post_process=False), Chunk()
    chunks: list[Any] = [first, last]
    chunk_losses(chunks, 8, wants_logits=False)
    assert "_postprocess" not in vars(first) and first.output_layer[1].gradient_accumulation_fusion
    installed: Any = last._postprocess
    assert isinstance(installed, ChunkedOutput)
    assert (installed._model, installed._tokens) == (last, 8)
    assert installed._values == last.compute_language_model_loss
    assert last.output_layer[1].gradient_accumulation_fusion is False
    assert not hasattr(last.output_layer[0], "gradient_accumulation_fusion")
    chunk_losses(chunks, 16, wants_logits=False)
    again: Any = last._postprocess
    assert again._tokens == 16 and again._plain == Chunk._postprocess.__get__(last), (
        "not one within the other"
    )
    chunk_losses(chunks, None, wants_logits=True)
    assert "_postprocess" not in vars(last)


@pytest.mark.parametrize(("tokens", "used"), [(None, 1024), (8, 8)])
def test_values_of_tokens_take_the_place_of_the_cross_entropy(tokens: int | None, used: int) -> None:
    given: list[Any] = []

    def values(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
        given.append((tuple(logits.shape), labels.tolist(), vocab_size))
        return logits[..., 0]

    last: Any = Chunk()
    chunk_losses([last], tokens, wants_logits=False, values=values, vocab_size=70)  # type: ignore[arg-type]
    assert last._postprocess._tokens == used
    found = last._postprocess._values(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.zeros(3, 2, 72))
    assert given == [((3, 2, 72), [[1, 4], [2, 5], [3, 6]], 70)] and found.shape == (2, 3)


@pytest.mark.parametrize(("layers", "wants_logits"), [(1, False), (0, True)])
@pytest.mark.parametrize(("tokens", "key"), [(None, "token_values"), (8, "loss_chunk_size")])
def test_the_setting_that_excludes_full_logits_is_named(
    layers: int, wants_logits: bool, tokens: int | None, key: str
) -> None:
    last: Any = Chunk()
    last.config.mtp_num_layers = layers
    with pytest.raises(McaError, match=f"^{key} is not supported with "):
        chunk_losses([last], tokens, wants_logits=wants_logits, values=max)  # type: ignore[arg-type]
    assert "_postprocess" not in vars(last)


def test_the_loss_of_mtp_layers_stays_installed() -> None:
    last: Any = Chunk()
    last._postprocess = installed = object()
    chunk_losses([last], None, wants_logits=False)
    assert last._postprocess is installed
