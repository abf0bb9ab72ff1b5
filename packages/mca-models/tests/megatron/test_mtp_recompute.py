"""Recomputed MTP layers get their tensors by position, and everything else in a closure."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from mca_models.megatron.platform.mtp import with_tensors_by_position


class Layer:
    """Hands its arguments to a checkpoint function as megatron-core 0.16 does."""

    def __init__(self) -> None:
        self.saved: list[object] = []

    def _checkpointed_forward(self, run: Callable[..., Tensor], *args: object, **given: object) -> Tensor:
        self.saved = [*args, *given.values()]
        return run(*args, **given)


def forward(
    *, hidden_states: Tensor, attention_mask: None, rotary_pos_emb: Tensor, packed_seq_params: str
) -> Tensor:
    assert attention_mask is None and packed_seq_params == "thd"
    return hidden_states - rotary_pos_emb


def test_a_recomputed_mtp_layer_saves_tensors_only() -> None:
    layer, hidden, rotary = Layer(), torch.tensor(3.0), torch.tensor(1.0)
    given = {
        "hidden_states": hidden,
        "attention_mask": None,
        "rotary_pos_emb": rotary,
        "packed_seq_params": "thd",
    }
    checkpointed = with_tensors_by_position(cast(Callable[..., Tensor], Layer._checkpointed_forward))
    assert float(checkpointed(layer, forward, **given)) == 2
    assert layer.saved == [hidden, rotary]
