"""Multi-token prediction (MTP) loss that is the same on every layout.

Each MTP layer predicts one token further ahead than the layer before. Its loss is the mean cross entropy over its own
targets in the global batch; the model's loss adds ``mtp_loss_scaling_factor / layers`` of it. megatron-core 0.16
divides by the targets of the model itself, which are more. Later versions divide by the targets of each rank's part of
a micro-batch, so the loss depends on how samples are batched. Neither handles a micro-batch without targets.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from mca_config.types import JsonObject
from mca_train.losses.token_loss import StepCounts
from mca_train.types import Chunk, Upstream

_LAYER_INPUTS = (
    "input_ids",
    "position_ids",
    "attention_mask",
    "rotary_pos_emb",
    "rotary_pos_cos",
    "rotary_pos_sin",
    "packed_seq_params",
    "sequence_len_offset",
)


@dataclass
class MtpLoss:
    """Inputs for the chunk with the loss in the running step, and its MTP losses.

    Args:
        targets: Loss count of the model, then of each MTP layer, of the step on all ranks.
        losses: This rank's share of the step's losses, by MTP layer.
    """

    targets: tuple[float, ...]
    losses: Tensor = field(default_factory=lambda: torch.zeros(0))


def install_mtp_loss(chunks: Iterable[Chunk]) -> None:
    """Make the chunk of ``chunks`` with the MTP loss compute it with this module."""
    for chunk in chunks:
        layers = chunk.config.mtp_num_layers
        if layers and chunk.post_process and "_postprocess" not in vars(chunk):
            losses = torch.zeros(layers, dtype=torch.float64, device=next(chunk.parameters()).device)
            chunk.mca_mtp_loss = MtpLoss((1.0,) * (layers + 1), losses)
            chunk._postprocess = partial(_postprocess, chunk, chunk._postprocess)


def begin_step(chunks: Iterable[Chunk], counts: StepCounts) -> None:
    """Set the counts of the coming step in ``chunks``."""
    for chunk in chunks:
        if "mca_mtp_loss" in vars(chunk):
            chunk.mca_mtp_loss.targets = counts.targets
            chunk.mca_mtp_loss.losses.zero_()


def _postprocess(
    model: Chunk, plain: Upstream, *, hidden_states: Tensor, labels: Upstream, **rest: Upstream
) -> Tensor:
    """Compute the MTP loss here, then call ``GPTModel._postprocess`` without it."""
    layers, is_here = model.config.mtp_num_layers, rest["mtp_in_postprocess"]
    trains = torch.is_grad_enabled() or model.training  # the experts' load is counted without gradients
    if layers and (trains or not is_here):
        if is_here:
            hidden_states = _run_layers(model, hidden_states, rest)
        hidden_states, *further = hidden_states.chunk(1 + layers)
        if labels is not None and torch.is_grad_enabled():
            hidden_states = _add_losses(model, hidden_states, further, labels, rest)
    model.config.mtp_num_layers = None
    try:
        output: Tensor = plain(
            hidden_states=hidden_states, labels=labels, **(rest | {"mtp_in_postprocess": False})
        )
        return output
    finally:
        model.config.mtp_num_layers = layers


def _run_layers(model: Chunk, hidden_states: Tensor, rest: JsonObject) -> Tensor:
    """Return the hidden states of the model and of each MTP layer, concatenated, from ``[s, b, h]``."""
    options = {name: rest[name] for name in _LAYER_INPUTS}
    result: Tensor = model.mtp(
        hidden_states=hidden_states, inference_params=None, embedding=model.embedding, **options
    )
    return result


def _add_losses(
    model: Chunk, hidden_states: Tensor, further: list[Tensor], labels: Tensor, rest: JsonObject
) -> Tensor:
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    state: MtpLoss = model.mca_mtp_loss
    mask, weight = rest["loss_mask"], _output_weight(model)
    for number, states in enumerate(further):
        logits, _ = model.output_layer(states, weight=weight)
        labels, mask = (_shift_left(model, values, rest["packed_seq_params"]) for values in (labels, mask))
        losses = model.compute_language_model_loss(labels, logits) * mask
        targets = max(state.targets[number + 1], 1.0)
        state.losses[number] += losses.detach().sum().double() / targets
        scale = model.config.mtp_loss_scaling_factor / len(further) * state.targets[0] / targets
        hidden_states = MTPLossAutoScaler.apply(hidden_states, losses * scale)
    return hidden_states


def _output_weight(model: Chunk) -> Tensor | None:
    """Return the weight for the output layer; None for the layer's own weight."""
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    if vars(model.config).get("mtp_detach_heads"):  # not in 0.16
        weight = (model.output_layer.weight if weight is None else weight).detach()
    return weight


def _shift_left(model: Chunk, values: Tensor, packed: Upstream) -> Tensor:
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    group = model.pg_collection.cp
    rolled: Tensor = roll_tensor(values, shifts=-1, dims=-1, cp_group=group, packed_seq_params=packed)[0]
    return rolled
