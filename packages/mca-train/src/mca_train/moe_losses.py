"""Gives experts' auxiliary losses the weight that was asked for, on every layout.

It is that of Hugging Face: the loss is ``cross entropy + coefficient x auxiliary loss``, both means over the global
batch, one over its targets, the other over its tokens. Megatron adds the auxiliary losses token by token to gradients
that are divided by all targets in the end (``calculate_per_token_loss``), and with megatron-core 0.16.1 and 0.19.2:

- a router reads that setting when it is built, which is before the trainer sets it, and then adds to the sum of a
  thousand tokens what was meant for their mean;
- tokens are more than targets: where only answers are targets, several times as many;
- padding counts, and how much of it there is depends on which samples a rank has and on what lengths are rounded to.
  Megatron takes a mask of it, which pipeline stages behind the first do not cut for sequence parallelism;
- a rank weighs its part by its *own* tokens. 0.16.1 stops there, so that the loss has ``1 / (tp x cp)`` of its weight;
  0.19.2 multiplies by the ranks, which holds as long as all have as many tokens without padding;
- a micro-batch of nothing but padding (there are some at the end of an epoch) divides by its zero tokens;
- the count behind expert biases takes the mask in a shape that does not fit.
"""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mca_train import groups
from mca_train.batches import MicroBatch, StepBatch

_COUNT = "get_tokens_per_expert_and_token_count"


class _Weight:
    """Targets per token of the running step, over all ranks; a constant of the step, for recomputation's sake."""

    targets_per_token = 1.0


def weigh_by_tokens(batch: StepBatch) -> None:
    """Counts the step's targets and tokens; collective."""
    counts = torch.stack(
        [
            torch.stack([micro.loss_mask.sum(), (~micro.padding).sum()]).double()
            for micro in batch.micro_batches
        ]
    ).sum(0)
    targets, tokens = groups.sum_over_samples(counts)
    _Weight.targets_per_token = float(targets / tokens.clamp(min=1))


def padding_for_experts(batch: MicroBatch, model: Any) -> Tensor | None:
    """What ``GPTModel`` takes as ``padding_mask``; None where nothing looks at it.

    Args:
        batch: Of this context-parallel rank.
        model: A chunk, wrapped or not.
    """
    from megatron.core import parallel_state
    from megatron.core.utils import get_attr_wrapped_model

    config = model.config
    if not config.num_moe_experts or config.mtp_num_layers:  # prediction layers shift their tokens
        return None
    mask = batch.padding
    if config.sequence_parallel and not get_attr_wrapped_model(model, "pre_process"):
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        mask = mask.chunk(ranks, 1)[parallel_state.get_tensor_model_parallel_rank()].contiguous()
    return mask


def weigh_alike(chunks: Iterable[torch.nn.Module]) -> None:
    """Mends Megatron's router, once per process, and tells those in ``chunks`` how losses are averaged."""
    from megatron.core.transformer.moe import router

    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, router.TopKRouter):
                module.calculate_per_token_loss = True
    if isinstance(getattr(router, _COUNT), _Count):
        return
    source = inspect.getsource(router.TopKRouter.attach_and_log_load_balancing_loss)
    by_ranks = "tp_cp_group.size()" in source
    setattr(router, _COUNT, _Count(getattr(router, _COUNT), multiplied=by_ranks))
    router.TopKRouter.apply_z_loss = _weighed(router.TopKRouter.apply_z_loss, multiplied=by_ranks)
    router.TopKRouter._apply_expert_bias = _with_column(router.TopKRouter._apply_expert_bias)


class _Count:
    """Megatron's function of that name, with what a micro-batch weighs instead of a rank's own tokens."""

    def __init__(self, plain: Any, *, multiplied: bool) -> None:
        self._plain, self._multiplied = plain, multiplied

    def __call__(self, *args: Any, reduce_group: Any, **options: Any) -> tuple[Any, Any, Any]:
        from megatron.core import parallel_state

        tokens_per_expert, _, total = self._plain(*args, reduce_group=reduce_group, **options)
        if isinstance(total, Tensor):
            total = total.clamp(min=1)
        sharing = parallel_state.get_tensor_and_context_parallel_group().size()
        tokens = total / reduce_group.size() * (1 if self._multiplied else sharing)
        return tokens_per_expert, tokens * _Weight.targets_per_token, total


def _weighed(plain: Any, *, multiplied: bool) -> Any:
    """Megatron's ``apply_z_loss``; 0.16.1 divides by the ranks that share a micro-batch twice."""

    def apply_z_loss(self: Any, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None:
            same: Tensor = plain(self, logits, padding_mask)
            return same
        ranks = 1 if multiplied else self.tp_cp_group.size()
        self.config.moe_z_loss_coeff = coefficient * ranks * _Weight.targets_per_token
        try:
            weighed: Tensor = plain(self, logits, padding_mask)
            return weighed
        finally:
            self.config.moe_z_loss_coeff = coefficient

    return apply_z_loss


def _with_column(plain: Any) -> Any:
    """Megatron's ``_apply_expert_bias`` with the mask ``[tokens]`` as a column beside ``[tokens, experts]``."""

    def apply_expert_bias(self: Any, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        plain(self, routing_map, None if padding_mask is None else padding_mask.reshape(-1, 1))

    return apply_expert_bias
