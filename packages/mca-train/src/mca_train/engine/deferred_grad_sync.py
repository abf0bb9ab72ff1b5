"""Gradient reduction of a vision model, deferred to the end of the step's backward pass.

With ``overlap_grad_reduce`` Megatron reduces a bucket as soon as all its gradients are ready. The vision model's
gradients are ready at different points of the backward pass in micro-batches with and without images. Replicas would
then reduce buckets in different orders.
"""

from collections.abc import Callable

from torch.nn import Parameter

from mca_models.megatron.types import GptModel, Upstream


def defer_vision_grad_sync(wrapped: Upstream, chunk: GptModel) -> None:
    """Make the buckets that hold vision parameters wait for the end of each step.

    Args:
        wrapped: Megatron's ``DistributedDataParallel`` of ``chunk``, with ``overlap_grad_reduce``.
        chunk: Megatron model.
    """
    if not hasattr(chunk, "vision_model"):
        return
    vision: set[Parameter] = set(chunk.vision_model.parameters())
    for group in wrapped.bucket_groups:
        if not vision.isdisjoint(group.params):
            group.reset = _reset_as_first_batch(group, group.reset)


def _reset_as_first_batch(group: Upstream, reset: Callable[[], None]) -> Callable[[], None]:
    """Return a reset that keeps the first batch's behavior: Megatron then waits for the end of the step."""

    def reset_group() -> None:
        reset()
        group.is_first_batch = True
        group.golden_per_param_grad_ready_counts = {}

    return reset_group
