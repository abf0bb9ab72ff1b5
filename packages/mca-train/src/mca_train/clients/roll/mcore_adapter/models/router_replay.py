"""Megatron's ``RouterReplay`` objects, which ROLL controls, on the routers of mca's chunks."""

from collections.abc import Sequence
from functools import partial

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from mca_config.errors import McaError
from mca_config.types import JsonObject
from mca_models.megatron.distributed import parallel
from mca_models.megatron.features.router_replay import (
    LIVE,
    ReplayableTopK,
    require_experts,
    require_replayable,
)
from mca_models.megatron.forward import gathered
from mca_models.megatron.layers.zigzag import take_rank_tokens
from mca_train.types import Chunk, VirtualModels


class LayerReplay(RouterReplay):  # type: ignore[misc]
    """Replay of one decoder layer; one without experts keeps what it is given unused.

    Args:
        choice: The choice of the layer's router; None: a dense layer.
        context_ranks: Context-parallel ranks.
    """

    def __init__(self, choice: ReplayableTopK | None, context_ranks: int = 1) -> None:
        super().__init__()
        self._context_ranks = context_ranks
        if choice is not None:
            choice.supply = self.experts

    def set_router_replay_action(self, router_replay_action: RouterReplayAction) -> None:
        """Set the source of the experts of the next passes.

        Raises:
            McaError: ROLL records, which it does not finish: its training step has no experts then.
        """
        if router_replay_action is RouterReplayAction.RECORD:
            raise McaError(
                "router_replay.mode: R2 is unfinished in ROLL, which does not collect the recorded experts; set R3 or "
                "disable"
            )
        super().set_router_replay_action(router_replay_action)

    def set_target_indices(self, topk_indices: Tensor) -> None:
        """Set the experts ``[tokens, topk]`` of the next pass; collective with context parallelism.

        Args:
            topk_indices: Experts of this tensor-parallel rank's part of the full sequences: ROLL shards them over
                tensor-parallel ranks only. A row is a token of one sequence, and the tokens at one position are
                neighbours, so equal parts of the rows are equal parts of the sequences.
        """
        if self._context_ranks > 1:
            tensor, context = parallel.tensor_group(), parallel.context_group()
            rows = torch.cat(gathered(topk_indices, tensor))
            rows = take_rank_tokens(rows, 0, context.rank(), context.size())
            topk_indices = rows.chunk(tensor.size())[tensor.rank()]
        super().set_target_indices(topk_indices)

    def experts(self, tokens: int) -> Tensor | None:
        """Return the experts ``[tokens, topk]`` of the running pass; None: the router chooses.

        Tokens without experts have zeros, which are no choice of several experts.

        Args:
            tokens: Tokens of the router.

        Raises:
            McaError: ROLL's experts are of another number of tokens.
        """
        if self.router_replay_action is None:
            return None
        replayed: Tensor
        if self.router_replay_action is RouterReplayAction.REPLAY_BACKWARD:
            replayed = self.replay_backward_list.pop(0)
        else:
            replayed = self.target_topk_idx
        if len(replayed) != tokens:
            raise McaError(
                f"routed_experts has {len(replayed)} rows on this rank, whose routers have {tokens} tokens; set "
                "use_dynamic_batching_in_train and use_dynamic_batching_in_infer to false, and sequence_parallel to "
                "true with tensor_model_parallel_size above 1"
            )
        if replayed.shape[1] == 1:
            return replayed
        absent = (replayed == 0).all(-1, keepdim=True)
        return replayed.masked_fill(absent, LIVE)


def enable_router_replay(models: VirtualModels) -> None:
    """Register a `LayerReplay` for every decoder layer of the rank, in the order in which ROLL counts them.

    Raises:
        McaError: The model's routers cannot replay.
    """
    require_experts(models.config, "router_replay.mode: R3")
    require_replayable(models.megatron)
    RouterReplay.clear_global_router_replay_instances()
    chunks: list[Chunk] = [*models.chunks]
    for chunk in chunks:
        choices = {choice.layer_number: choice for _, choice in chunk.router_choices}
        replays = [
            LayerReplay(choices.get(layer.layer_number), models.rank_context.layout.cp)
            for layer in chunk.decoder.layers
        ]
        chunk.register_forward_pre_hook(partial(_require_unpacked, replays), with_kwargs=True)


def _require_unpacked(
    replays: Sequence[LayerReplay], chunk: Chunk, args: tuple[object, ...], kwargs: JsonObject
) -> None:
    """Raise if ROLL packs sequences whose experts it replays: it does not pack the experts."""
    if kwargs.get("packed_seq_params") is not None and any(each.router_replay_action for each in replays):
        raise McaError(
            "router_replay.mode: R3 is not supported with use_sequence_packing: true, with which ROLL does not pack "
            "routed_experts; set use_sequence_packing to false, or the mode to disable"
        )
