"""Word and position embeddings: norms, factor, dropout and padding as in HF's modules."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from mca_config.checks import require_learned_positions
from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.feature import Feature
from mca_models.megatron.features.norms import PostNorm
from mca_models.megatron.types import GptModel, MegatronModule


def train_embedding_like_hf(model: GptModel, config: McaModelConfig) -> None:
    """Set the model's embedding dropout, and drop the gradient of padding tokens' rows.

    The row of a tied output layer keeps the gradient that it gets there.
    """
    if not hasattr(model, "embedding"):
        return
    if config.block.hidden_dropout:
        dropout = model.embedding.embedding_dropout
        dropout.p = config.embedding.embedding_dropout if dropout.p else 0.0  # a run may turn both off
    if config.embedding.pad_token_id is not None:
        row = config.embedding.pad_token_id % config.vocab_size  # torch counts a negative one from the end
        tables = [
            "word_embeddings",
            *(["per_layer_embeddings"] if hasattr(model.embedding, "per_layer_embeddings") else []),
        ]
        for table in tables:
            getattr(model.embedding, table).register_forward_hook(_without_gradient(row))


def set_learned_positions(model: GptModel, config: McaModelConfig) -> None:
    """Set the dtype of a chunk's position embeddings, and add the offset of their rows."""
    if hasattr(model, "embedding"):
        table = model.embedding.position_embeddings
        table.to(model.config.params_dtype)  # Megatron makes it in fp32, which would promote all activations
        table.register_forward_pre_hook(_rows(config))


def _rows(config: McaModelConfig) -> Callable[[torch.nn.Module, tuple[Tensor]], Tensor]:
    """Return a hook that adds the position offset; on the CPU it raises for positions without a row."""

    def rows(table: torch.nn.Module, args: tuple[Tensor]) -> Tensor:
        positions, most = args[0], config.max_position_embeddings
        if positions.device.type == "cpu" and positions.numel():
            require_learned_positions(int(positions.max()) + 1, most)
        return positions + config.embedding.position_offset

    return rows


def scale_embedding(model: GptModel, config: McaModelConfig) -> None:
    """Multiply a chunk's embeddings."""
    factor = config.embedding.embedding_multiplier

    def scale(module: torch.nn.Module, args: tuple[object, ...], output: Tensor) -> Tensor:
        # HF rounds the factor to the weights' dtype; made on the device to avoid a synchronisation
        return output * torch.full((), factor, dtype=output.dtype, device=output.device)

    if hasattr(model, "embedding"):
        model.embedding.register_forward_hook(scale)


def normalise_embedding(model: GptModel, epsilon: float) -> None:
    """Normalize a chunk's embeddings, without weights."""
    if hasattr(model, "embedding"):

        def normalise(module: MegatronModule, args: tuple[object, ...], output: Tensor) -> Tensor:
            return rms_norm(output.float(), output.shape[-1:], None, epsilon).to(output.dtype)

        model.embedding.register_forward_hook(normalise)


def add_embedding_norm(model: GptModel) -> None:
    """Add a norm with weights to the output of a chunk's embedding."""
    if hasattr(model, "embedding"):
        config = model.config
        model.embedding.layernorm = PostNorm(config, config.hidden_size, config.layernorm_epsilon)
        model.embedding.register_forward_hook(lambda module, args, output: module.layernorm(output))


def _without_gradient(row: int) -> Callable[[MegatronModule, tuple[Tensor], Tensor], Tensor]:
    def hook(module: MegatronModule, args: tuple[Tensor], output: Tensor) -> Tensor:
        padding = args[0] == row  # [batch, seq]
        if module.reduce_scatter_embeddings:  # the output is [seq / tp, batch, hidden]
            group = module.tp_group
            # contiguous, because `where` keeps the strides of its condition, and stages send contiguous tensors
            padding = padding.transpose(0, 1).contiguous().chunk(group.size())[group.rank()]
        return torch.where(padding.unsqueeze(-1), output.detach(), output)

    return hook


LEARNED_POSITIONS = Feature(
    name="learned positions",
    enabled=lambda config: config.embedding.learned_positions,
    position_embedding="learned_absolute",
    finish=set_learned_positions,
)
EMBEDDING_NORM = Feature(
    name="norm of embeddings without weights",
    enabled=lambda config: config.embedding.embedding_norm,
    finish=lambda model, config: normalise_embedding(model, config.norm.layernorm_epsilon),
)
EMBEDDING_LAYERNORM = Feature(
    name="norm of embeddings",
    enabled=lambda config: config.embedding.embedding_layernorm,
    finish=lambda model, config: add_embedding_norm(model),
)
EMBEDDING_MULTIPLIER = Feature(
    name="factor on embeddings",
    enabled=lambda config: config.embedding.embedding_multiplier != 1.0,
    finish=scale_embedding,
)
EMBEDDING = Feature(
    name="training of embeddings", enabled=lambda config: True, finish=train_embedding_like_hf
)
