"""The loss of prediction layers as it is defined, on every layout.

Each predicts one token further ahead than the layer before. Its loss is the mean cross entropy over its own targets
in the global batch; the model's has ``mtp_loss_scaling_factor / layers`` of it. megatron-core 0.16 divides by the
targets of the model itself, which are more; later ones by the targets of each rank's part of a micro-batch, so that
it depends on what lies together there, and neither tells a micro-batch without targets apart.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from mca_config.types import JsonObject
from mca_train.losses.step_counts import StepCounts
from mca_train.types import Chunk, Upstream


@dataclass
class Prediction:
    """What the chunk with the loss is told of the running step, and the losses that it finds.

    Args:
        targets: Of the step on all ranks: what the model's loss is divided by, then of each prediction layer.
        found: By prediction layer, this rank's share of the losses of the step.
    """

    targets: tuple[float, ...]
    found: Tensor = field(default_factory=lambda: torch.zeros(0))


def predict(chunks: Iterable[Chunk]) -> None:
    """Has those of ``chunks`` with prediction layers' loss compute it by this module."""
    for chunk in chunks:
        layers = chunk.config.mtp_num_layers
        if layers and chunk.post_process and "_postprocess" not in vars(chunk):
            found = torch.zeros(layers, dtype=torch.float64, device=next(chunk.parameters()).device)
            chunk.mca_prediction = Prediction((1.0,) * (layers + 1), found)
            chunk._postprocess = partial(_postprocess, chunk, chunk._postprocess)


def begin_step(chunks: Iterable[Chunk], counts: StepCounts) -> None:
    """Tells ``chunks`` what the coming step has."""
    for chunk in chunks:
        if "mca_prediction" in vars(chunk):
            chunk.mca_prediction.targets = counts.targets
            chunk.mca_prediction.found.zero_()


def _postprocess(
    model: Chunk, plain: Upstream, *, hidden_states: Tensor, labels: Upstream, **rest: Upstream
) -> Tensor:
    """A ``GPTModel``'s method of that name, without what it does for prediction layers, which is done here."""
    layers, is_here = model.config.mtp_num_layers, rest["mtp_in_postprocess"]
    trains = torch.is_grad_enabled() or model.training  # experts' load is counted without gradients
    if layers and (trains or not is_here):
        if is_here:
            hidden_states = _run_layers(model, hidden_states, rest)
        hidden_states, *further = hidden_states.chunk(1 + layers)
        if labels is not None and torch.is_grad_enabled():
            hidden_states = _with_losses(model, hidden_states, further, labels, rest)
    model.config.mtp_num_layers = None
    try:
        output: Tensor = plain(
            hidden_states=hidden_states, labels=labels, **(rest | {"mtp_in_postprocess": False})
        )
        return output
    finally:
        model.config.mtp_num_layers = layers


_TAKEN = (
    "input_ids",
    "position_ids",
    "attention_mask",
    "rotary_pos_emb",
    "rotary_pos_cos",
    "rotary_pos_sin",
    "packed_seq_params",
    "sequence_len_offset",
)


def _run_layers(model: Chunk, hidden_states: Tensor, rest: JsonObject) -> Tensor:
    """``[s, b, h]`` to that of the model and of each prediction layer, one after another."""
    options = {name: rest[name] for name in _TAKEN}
    result: Tensor = model.mtp(
        hidden_states=hidden_states, inference_params=None, embedding=model.embedding, **options
    )
    return result


def _with_losses(
    model: Chunk, hidden_states: Tensor, further: list[Tensor], labels: Tensor, rest: JsonObject
) -> Tensor:
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    prediction: Prediction = model.mca_prediction
    mask, weight = rest["loss_mask"], _output_weight(model)
    for number, states in enumerate(further):
        logits, _ = model.output_layer(states, weight=weight)
        labels, mask = (_one_ahead(model, values, rest["packed_seq_params"]) for values in (labels, mask))
        losses = model.compute_language_model_loss(labels, logits) * mask
        targets = max(prediction.targets[number + 1], 1.0)
        prediction.found[number] += losses.detach().sum().double() / targets
        scale = model.config.mtp_loss_scaling_factor / len(further) * prediction.targets[0] / targets
        hidden_states = MTPLossAutoScaler.apply(hidden_states, losses * scale)
    return hidden_states


def _output_weight(model: Chunk) -> Tensor | None:
    """What Megatron gives the output layer; None: its own."""
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    if vars(model.config).get("mtp_detach_heads"):  # not in 0.16
        weight = (model.output_layer.weight if weight is None else weight).detach()
    return weight


def _one_ahead(model: Chunk, values: Tensor, packed: Upstream) -> Tensor:
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    group = model.pg_collection.cp
    rolled: Tensor = roll_tensor(values, shifts=-1, dims=-1, cp_group=group, packed_seq_params=packed)[0]
    return rolled
