"""Embeddings of its own that each layer takes beside the hidden states (Gemma 4 E2B, E4B).

Those of all layers are made together, of a token and of its embedding. They reach the layers as the block's
``context_mask``, which a decoder has no other use for, and which Megatron hands through recomputation: gradients
come back the same way.
"""

import torch
from torch import Tensor

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.megatron.families.norms import PostNorm
from mca_models.megatron.layers.replicated import ReplicatedLinear
from mca_models.megatron.types import GptModel, MegatronModule

Arguments = tuple[object, ...]


def add_per_layer_embeddings(model: GptModel, config: McaModelConfig) -> None:
    """Gives a chunk with the embedding a table of such embeddings, and its layers what they take them with."""
    from megatron.core.tensor_parallel import VocabParallelEmbedding

    megatron, embedding = model.config, model.embedding
    hidden, own = config.hidden_size, config.per_layer_input_size
    made = {"config": megatron, "init_method": megatron.init_method}
    embedding.per_layer_embeddings = VocabParallelEmbedding(
        config.padded_vocab_size,
        config.num_layers * own,
        reduce_scatter_embeddings=embedding.reduce_scatter_embeddings,
        tp_group=embedding.tp_group,
        **made,
    )
    embedding.per_layer_projection = ReplicatedLinear(hidden, config.num_layers * own, **made)
    embedding.per_layer_layernorm = PostNorm(megatron, own, megatron.layernorm_epsilon)
    inputs = _Inputs(own)
    embedding.register_forward_hook(inputs.after_embedding, with_kwargs=True)
    model.decoder.register_forward_pre_hook(inputs.before_block, with_kwargs=True)
    for layer in model.decoder.layers:
        layer.per_layer_gate = ReplicatedLinear(hidden, own, **made)
        layer.per_layer_projection = ReplicatedLinear(own, hidden, **made)
        layer.per_layer_layernorm = PostNorm(megatron, hidden, megatron.layernorm_epsilon)
        layer.register_forward_hook(_add_input, with_kwargs=True)


class _Inputs:
    """What all layers take of the micro-batch whose embeddings were computed last."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._made: Tensor | None = None

    def after_embedding(
        self, embedding: MegatronModule, args: Arguments, kwargs: JsonObject, output: Tensor
    ) -> None:
        """Makes them, ``[s, b, layers, channels]``, of the tokens and of their scaled embeddings."""
        tokens = args[0] if args else kwargs["input_ids"]
        table = embedding.per_layer_embeddings
        of_tokens = table(tokens)
        if not table.reduce_scatter_embeddings:
            of_tokens = of_tokens.transpose(0, 1)
        # HF keeps the factor in the weights' dtype; the device makes it itself, and is not waited for
        factor = torch.full((), self._size**0.5, dtype=of_tokens.dtype, device=of_tokens.device)
        of_tokens = (of_tokens * factor).unflatten(-1, (-1, self._size))
        hidden = output.to(table.weight.dtype)
        projected, _ = embedding.per_layer_projection(hidden)
        projected = (projected * hidden.shape[-1] ** -0.5).unflatten(-1, (-1, self._size))
        self._made = (embedding.per_layer_layernorm(projected) + of_tokens) * 2.0**-0.5

    def before_block(
        self, block: MegatronModule, args: Arguments, kwargs: JsonObject
    ) -> tuple[Arguments, JsonObject]:
        """Hands them in."""
        made, self._made = self._made, None
        return args, {**kwargs, "context_mask": made}


def _add_input(
    layer: MegatronModule, args: Arguments, kwargs: JsonObject, output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Adds to what a layer gives its own embedding, as far as a gate lets it through."""
    hidden, context = output
    taken = kwargs["context_mask"][:, :, layer.layer_number - 1]
    gate, _ = layer.per_layer_gate(hidden.to(taken.dtype))
    projected, _ = layer.per_layer_projection(layer.config.activation_func(gate) * taken)
    return hidden + layer.per_layer_layernorm(projected), context
