"""Experts that verl's rollout chose (router replay R3), as the column ``routed_experts`` of mca's samples."""

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad

from mca_config.errors import McaError
from mca_models.megatron.features.router_replay import LIVE
from mca_train.batching.packing import ROUTED_EXPERTS


def rollout_experts(data: TensorDict, tokens: Sequence[Tensor]) -> list[Tensor]:
    """Return the experts of each sequence, ``[tokens, layers, topk]``, -1 for tokens without.

    verl's rows have no experts for the last token, which the rollout does not feed to the model, and zeros for other
    tokens without: those after the last generation of several turns, and samples that fill up a batch. As the experts
    of a token differ, zeros of more than one expert are no choice.

    Args:
        data: verl's micro-batch.
        tokens: ``input_ids`` of each sequence.

    Raises:
        McaError: verl has no experts, or those of another number of tokens.
    """
    if ROUTED_EXPERTS not in data.keys():
        raise McaError(
            "engine.router_replay.mode is R3, but verl's batch has no routed_experts; set "
            "rollout.enable_rollout_routing_replay to true, or the mode to disabled"
        )
    return [
        _aligned(rows.cpu(), len(ids))
        for rows, ids in zip(data[ROUTED_EXPERTS].unbind(), tokens, strict=True)
    ]


def _aligned(rows: Tensor, tokens: int) -> Tensor:
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
