"""The mask of padding reaches an MTP layer where megatron-core 0.18 would fail on it."""

from collections.abc import Callable

import torch
from torch import Tensor

from mca_models.megatron.platform.mtp import with_mask


class Layer:
    """Takes and gives what Megatron's MTP layer does there."""

    scale = 2

    def _checkpointed_forward(self, hidden_states: Tensor, *, context: int) -> Callable[[], Tensor]:
        return lambda: self._proj_and_transformer_layer(
            hidden_states=hidden_states * self.scale, context=context
        )

    def _proj_and_transformer_layer(
        self, *, hidden_states: Tensor, context: int, padding_mask: Tensor | None = None
    ) -> Tensor:
        return hidden_states if padding_mask is None else hidden_states.masked_fill(padding_mask, context)


def test_what_is_computed_again_is_told_of_the_padding() -> None:
    hidden, mask = torch.tensor([1.0, 2.0]), torch.tensor([False, True])
    forward = with_mask(Layer._checkpointed_forward)  # type: ignore[arg-type]
    masked, plain = (
        forward(Layer(), hidden, context=7, padding_mask=mask),
        forward(Layer(), hidden, context=7),
    )
    assert masked().tolist() == [2, 7] and plain().tolist() == [2, 4]  # type: ignore[operator]
