"""Gradients of a vision model are reduced when the step's backward pass is over, not while it runs.

With ``overlap_grad_reduce`` Megatron reduces a bucket as soon as all its gradients are there. In a micro-batch without
images those of the vision model come at another place of the backward pass than in one with images, and replicas would
reduce buckets in different orders. Which parameters are in a bucket is known to Megatron.
"""

from collections.abc import Callable

from torch.nn import Parameter

from mca_models.megatron.types import GptModel, Upstream


def reduce_vision_late(wrapped: Upstream, chunk: GptModel) -> None:
    """Has the buckets that hold parameters of the vision model wait for the end of each step.

    Args:
        wrapped: Megatron's ``DistributedDataParallel`` of ``chunk``, with ``overlap_grad_reduce``.
        chunk: Of a model.
    """
    if not hasattr(chunk, "vision_model"):
        return
    vision: set[Parameter] = set(chunk.vision_model.parameters())
    for group in wrapped.bucket_groups:
        if not vision.isdisjoint(group.params):
            group.reset = _as_before_the_first_step(group, group.reset)


def _as_before_the_first_step(group: Upstream, reset: Callable[[], None]) -> Callable[[], None]:
    """In its first step Megatron waits for the end, as it does not yet know how often a gradient comes."""

    def again() -> None:
        reset()
        group.is_first_batch = True
        group.golden_per_param_grad_ready_counts = {}

    return again
