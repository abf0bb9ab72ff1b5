"""Megatron's ``RouterReplay`` objects, which ROLL controls, on the routers of mca's chunks."""

from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from mca_config.errors import McaError
from mca_models.megatron.features.router_replay import (
    LIVE,
    ReplayableTopK,
    require_experts,
    require_replayable,
)
from mca_train.types import Chunk, VirtualModels


class LayerReplay(RouterReplay):  # type: ignore[misc]
    """Replay of one decoder layer; one without experts keeps what it is given unused.

    Args:
        choice: The choice of the layer's router; None: a dense layer.
    """

    def __init__(self, choice: ReplayableTopK | None) -> None:
        super().__init__()
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
                "use_sequence_packing to false, and sequence_parallel to true with tensor_model_parallel_size above 1"
            )
        if replayed.shape[1] == 1:
            return replayed
        absent = (replayed == 0).all(-1, keepdim=True)
        return replayed.masked_fill(absent, LIVE)


def enable_router_replay(models: VirtualModels) -> None:
    """Register a `LayerReplay` for every decoder layer of the rank, in the order in which ROLL counts them.

    Raises:
        McaError: The model's routers cannot replay, or ROLL would not shard their experts.
    """
    require_experts(models.config, "router_replay.mode: R3")
    require_replayable(models.megatron)
    if (cp := models.rank_context.layout.cp) > 1:
        raise McaError(
            f"router_replay.mode: R3 is not supported with context_parallel_size {cp}, over which ROLL does not shard "
            "routed_experts; set context_parallel_size to 1, or the mode to disable"
        )
    RouterReplay.clear_global_router_replay_instances()
    chunks: list[Chunk] = [*models.chunks]
    for chunk in chunks:
        choices = {choice.layer_number: choice for _, choice in chunk.router_choices}
        for layer in chunk.decoder.layers:
            LayerReplay(choices.get(layer.layer_number))
