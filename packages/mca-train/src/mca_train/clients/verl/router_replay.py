"""Router replay of verl: experts of its batches as the column ``routed_experts`` of mca's samples, and recording them.

R3 takes the experts that the rollout chose. R2 takes those that this engine chose when verl computed the actor's
log-probabilities, which `recorded_routing` returns.
"""

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad

from mca_config.errors import McaError
from mca_models.megatron import platform
from mca_models.megatron.distributed import parallel
from mca_models.megatron.features.router_replay import LIVE, recorded_experts, require_experts
from mca_train.batching.micro_batch import MicroBatch
from mca_train.batching.packing import ROUTED_EXPERTS
from mca_train.clients.verl.batches import VerlMicroBatch, flat_outputs
from mca_train.types import VirtualModels

_REMEDIES = {
    "R3": "set rollout.enable_rollout_routing_replay to true",
    "R2": "compute the actor's log-probabilities first, which records them",
}


def batch_experts(data: TensorDict, tokens: Sequence[Tensor], mode: str) -> list[Tensor]:
    """Return the experts of each sequence, ``[tokens, layers, topk]``, -1 for tokens without.

    Args:
        data: verl's micro-batch.
        tokens: ``input_ids`` of each sequence.
        mode: ``R2`` or ``R3``.

    Raises:
        McaError: verl has no experts, or those of another number of tokens.
    """
    if ROUTED_EXPERTS not in data.keys():
        raise McaError(
            f"engine.router_replay.mode is {mode}, but verl's batch has no routed_experts; {_REMEDIES[mode]}, or the "
            "mode to disabled"
        )
    return [
        _aligned(rows.cpu(), len(ids))
        for rows, ids in zip(data[ROUTED_EXPERTS].unbind(), tokens, strict=True)
    ]


def _aligned(rows: Tensor, tokens: int) -> Tensor:
    """Return ``rows`` with -1 for the last token, which predicts nothing, and for tokens without experts.

    verl's rows of a rollout have no experts for the last token, which the rollout does not feed to the model, and zeros
    for other tokens without: those after the last generation of several turns, and samples that fill up a batch. As the
    experts of a token differ, zeros of more than one expert are no choice.
    """
    if rows.ndim != 3 or len(rows) not in (tokens, tokens - 1):
        raise McaError(
            f"routed_experts of verl's batch has shape {list(rows.shape)} for {tokens} tokens; expected "
            f"[{tokens - 1} or {tokens}, layers, topk]"
        )
    known = rows[: tokens - 1]
    if rows.shape[-1] > 1:
        absent = (known == 0).flatten(1).all(-1)
        known = torch.where(absent[:, None, None], LIVE, known)
    return pad(known, (0, 0, 0, 0, 0, 1), value=LIVE)


def recorded_routing(models: VirtualModels, batches: Sequence[MicroBatch]) -> list[Tensor]:
    """Return the experts that the routers chose in the last passes, nested, for each micro-batch; collective.

    A sequence has ``[tokens, layers with experts, topk]``. Called in `routed_passes` with ``record``.

    Args:
        models: The model.
        batches: The micro-batches of the passes.
    """
    shape = require_experts(models.config, "engine.router_replay.mode: R2")
    tensor, splits = parallel.tensor_group(), bool(models.megatron.sequence_parallel)
    groups = [parallel.pipeline_group(), *([tensor] if splits else [])]
    device = platform.current_device()
    nested = []
    for number, batch in enumerate(batches):
        assert isinstance(batch, VerlMicroBatch)
        rows, tokens = batch.input_ids.shape
        size = (rows, tokens, len(shape.layers), shape.topk)
        found = torch.zeros(size, dtype=torch.int32, device=device)  # NCCL has no int16
        own = found.chunk(tensor.size(), 1)[tensor.rank()] if splits else found
        for chunk in models.chunks:
            for layer, passes in recorded_experts(chunk):
                own[:, :, layer] = passes[number].unflatten(0, (-1, rows)).transpose(0, 1).int()
        for group in groups:
            if group.size() > 1:
                torch.distributed.all_reduce(found, group=group)  # each element is 0 on all ranks but one
        flat, offsets = flat_outputs(found.flatten(2).permute(2, 0, 1), batch)
        experts = flat.unflatten(1, (len(shape.layers), shape.topk)).to(torch.int16)
        nested.append(torch.nested.nested_tensor_from_jagged(experts, offsets))
    return nested
