"""Per-layer embeddings: each layer adds its own embedding of the tokens (Gemma 4 E2B, E4B).

The embeddings of all layers are computed together from a token and its embedding. They reach the layers as the
block's ``context_mask``, which a decoder does not use otherwise, and which Megatron passes through recomputation;
gradients take the same path back.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.media import placeholders
from mca_models.megatron.features.feature import Feature
from mca_models.megatron.features.norms import PostNorm
from mca_models.megatron.layers.sharded import ReplicatedLinear
from mca_models.megatron.types import GptModel, MegatronModule

Arguments = tuple[object, ...]


def padding_problems(config: McaModelConfig) -> Iterator[str]:
    """Yield why images have no per-layer embeddings, which are those of padding."""
    if config.per_layer_embedding is not None and config.embedding.pad_token_id is None:
        yield "pad_token_id is null, of which images take the per-layer embeddings; set it in config.json"


def add_per_layer_embeddings(model: GptModel, config: McaModelConfig) -> None:
    """Add the per-layer embedding table to a chunk with the embedding, and gates to its layers."""
    from megatron.core.tensor_parallel import VocabParallelEmbedding

    megatron, embedding = model.config, model.embedding
    hidden, channels = config.hidden_size, given(config.per_layer_embedding).per_layer_input_size
    common = {"config": megatron, "init_method": megatron.init_method}
    embedding.per_layer_embeddings = VocabParallelEmbedding(
        config.padded_vocab_size,
        config.num_layers * channels,
        reduce_scatter_embeddings=embedding.reduce_scatter_embeddings,
        tp_group=embedding.tp_group,
        **common,
    )
    embedding.per_layer_projection = ReplicatedLinear(hidden, config.num_layers * channels, **common)
    embedding.per_layer_layernorm = PostNorm(megatron, channels, megatron.layernorm_epsilon)
    inputs = _PerLayerInputs(channels, config)
    embedding.register_forward_hook(inputs.after_embedding, with_kwargs=True)
    model.decoder.register_forward_pre_hook(inputs.before_block, with_kwargs=True)
    for layer in model.decoder.layers:
        layer.per_layer_gate = ReplicatedLinear(hidden, channels, **common)
        layer.per_layer_projection = ReplicatedLinear(channels, hidden, **common)
        layer.per_layer_layernorm = PostNorm(megatron, hidden, megatron.layernorm_epsilon)
        layer.register_forward_hook(_add_input, with_kwargs=True)


class _PerLayerInputs:
    """Per-layer embeddings of the micro-batch that was embedded last."""

    def __init__(self, size: int, config: McaModelConfig) -> None:
        self._size, self._padding = size, config.embedding.pad_token_id
        self._placeholders = frozenset(placeholders(config.vision_fields).values())
        self._embeddings: Tensor | None = None

    def after_embedding(
        self, embedding: MegatronModule, args: Arguments, kwargs: JsonObject, output: Tensor
    ) -> None:
        """Compute them, ``[s, b, layers, channels]``, from the tokens and their scaled embeddings."""
        tokens: Tensor = kwargs["input_ids"] if not args else args[0]  # type: ignore[assignment]
        tokens = self._without_placeholders(tokens)
        table = embedding.per_layer_embeddings
        token_embeddings = table(tokens)
        if not table.reduce_scatter_embeddings:
            token_embeddings = token_embeddings.transpose(0, 1)
        # HF rounds the factor to the weights' dtype; made on the device to avoid a synchronisation
        factor = torch.full((), self._size**0.5, dtype=token_embeddings.dtype, device=token_embeddings.device)
        token_embeddings = (token_embeddings * factor).unflatten(-1, (-1, self._size))
        hidden = output.to(table.weight.dtype)
        projected, _ = embedding.per_layer_projection(hidden)
        projected = (projected * hidden.shape[-1] ** -0.5).unflatten(-1, (-1, self._size))
        self._embeddings = (embedding.per_layer_layernorm(projected) + token_embeddings) * 2.0**-0.5

    def _without_placeholders(self, tokens: Tensor) -> Tensor:
        """Return ``tokens`` with padding for placeholders of images and videos, as in transformers."""
        if self._padding is None:
            return tokens
        for placeholder in self._placeholders:
            tokens = tokens.masked_fill(tokens == placeholder, self._padding)
        return tokens

    def before_block(
        self, block: MegatronModule, args: Arguments, kwargs: JsonObject
    ) -> tuple[Arguments, JsonObject]:
        """Pass them to the decoder block."""
        embeddings, self._embeddings = self._embeddings, None
        return args, {**kwargs, "context_mask": embeddings}


def _add_input(
    layer: MegatronModule, args: Arguments, kwargs: JsonObject, output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Add the layer's gated embedding to its output."""
    hidden, context = output
    embedding = kwargs["context_mask"][:, :, layer.layer_number - 1]
    gate, _ = layer.per_layer_gate(hidden.to(embedding.dtype))
    projected, _ = layer.per_layer_projection(layer.config.activation_func(gate) * embedding)
    return hidden + layer.per_layer_layernorm(projected), context


PER_LAYER_EMBEDDING = Feature(
    name="per-layer embeddings",
    enabled=lambda config: config.per_layer_embedding is not None,
    finish=add_per_layer_embeddings,
)
