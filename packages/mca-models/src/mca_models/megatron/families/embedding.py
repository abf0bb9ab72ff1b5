"""Word embeddings in training, as HF's modules have them.

Their scale is in `scales`.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from mca_config.model_config import McaModelConfig
from mca_models.megatron.types import GptModel, MegatronModule


def train_embedding_like_hf(model: GptModel, config: McaModelConfig) -> None:
    """Takes the dropout from a chunk's embedding, and the gradient from the padding token's row, if it has any.

    The row of a tied output layer keeps the gradient that it gets there.
    """
    if not hasattr(model, "embedding"):
        return
    if config.hidden_dropout:
        model.embedding.embedding_dropout.p = 0.0
    if config.pad_token_id is not None:
        row = config.pad_token_id % config.vocab_size  # torch counts a negative one from the end
        model.embedding.word_embeddings.register_forward_hook(_without_gradient(row))


def normalise_embedding(model: GptModel, epsilon: float) -> None:
    """Has a chunk's embeddings normalised, without weights."""
    if hasattr(model, "embedding"):

        def normalise(module: MegatronModule, args: tuple[object, ...], output: Tensor) -> Tensor:
            return rms_norm(output.float(), output.shape[-1:], None, epsilon).to(output.dtype)

        model.embedding.register_forward_hook(normalise)


def _without_gradient(row: int) -> Callable[[MegatronModule, tuple[Tensor], Tensor], Tensor]:
    def hook(module: MegatronModule, args: tuple[Tensor], output: Tensor) -> Tensor:
        padding = args[0] == row  # [batch, seq]
        if module.reduce_scatter_embeddings:  # the output is [seq / tp, batch, hidden]
            group = module.tp_group
            # in one piece, as `where` lays out what it gives like its condition, and a stage sends no strides
            padding = padding.transpose(0, 1).contiguous().chunk(group.size())[group.rank()]
        return torch.where(padding.unsqueeze(-1), output.detach(), output)

    return hook
