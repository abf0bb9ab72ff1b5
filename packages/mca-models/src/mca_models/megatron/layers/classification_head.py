"""Sequence- and token-classification head that replaces Megatron's output layer."""

import torch
from torch import Tensor

from mca_models.megatron.types import MegatronConfig, WithBias


class ClassificationHead(torch.nn.Module):
    """Linear from ``[s, b, hidden]`` to ``[s, b, labels]``, replicated on every tensor rank.

    With sequence parallelism a rank scores its tokens and gathers the scores of the others, which is cheaper than
    gathering hidden states. Megatron sums the ranks' gradients, as for norms.

    Args:
        megatron: The model's configuration.
        num_labels: Number of scores per token.
        bias: Whether to add a bias.
    """

    def __init__(self, megatron: MegatronConfig, num_labels: int, *, bias: bool) -> None:
        super().__init__()
        self.sequence_parallel: bool = megatron.sequence_parallel

        def make(*shape: int) -> torch.nn.Parameter:
            parameter = torch.nn.Parameter(torch.empty(*shape, dtype=megatron.params_dtype))
            parameter.sequence_parallel = megatron.sequence_parallel  # type: ignore[attr-defined]
            parameter.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
            return parameter

        self.weight = make(num_labels, megatron.hidden_size)
        self.bias = make(num_labels) if bias else None

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> WithBias:
        """Return the scores; arguments as for Megatron's output layer."""
        scores = torch.nn.functional.linear(hidden, self.weight, self.bias)
        if self.sequence_parallel:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            scores = gather_from_sequence_parallel_region(scores, tensor_parallel_output_grad=False)
        return scores, None
