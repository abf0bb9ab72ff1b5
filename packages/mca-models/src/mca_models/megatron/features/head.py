"""Output layer: bias, factor, cap and padded rows of logits, or a classification head in its place."""

import torch
from torch import Tensor

from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.feature import Feature
from mca_models.megatron.layers.sharded import cut_parameter, replicated_parameter
from mca_models.megatron.types import GptModel, MegatronConfig, WithBias


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
            parameter = replicated_parameter(torch.empty(*shape, dtype=megatron.params_dtype), megatron)
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


def _replace_head(model: GptModel, config: McaModelConfig) -> None:
    labels, bias = config.head.num_labels, config.head.head_kind == "token_classification"
    if model.post_process and labels is not None:
        model.output_layer = ClassificationHead(model.config, labels, bias=bias)


def _add_bias(model: GptModel, config: McaModelConfig) -> None:
    """Add a bias to a chunk's output layer, if it has one, sharded as its weight is."""
    if hasattr(model, "output_layer"):
        layer = model.output_layer
        bias: torch.nn.Parameter = cut_parameter(
            (layer.output_size_per_partition,), model.config.params_dtype
        )
        layer.bias = bias


def _scale_logits(model: GptModel, config: McaModelConfig) -> None:
    """Divide a chunk's logits, and cap them."""
    divisor, cap = config.head.logits_scaling, config.head.final_logit_softcapping

    def scale(module: torch.nn.Module, args: tuple[object, ...], output: WithBias) -> WithBias:
        logits, bias = output
        logits = logits / divisor
        return logits if cap is None else (logits / cap).tanh() * cap, bias

    if hasattr(model, "output_layer"):
        model.output_layer.register_forward_hook(scale)


def _mask_padding(model: GptModel, config: McaModelConfig) -> None:
    """Set the logits of padded vocabulary rows to the lowest number, so that softmax and loss ignore them."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    padded = config.padded_vocab_size
    share = padded // group.size()

    def mask(module: torch.nn.Module, args: tuple[object, ...], output: WithBias) -> WithBias:
        logits, bias = output
        first = 0 if logits.shape[-1] == padded else group.rank() * share
        true = max(config.vocab_size - first, 0)
        if true >= logits.shape[-1]:
            return output
        columns = torch.arange(logits.shape[-1], device=logits.device) >= true
        return logits.masked_fill(columns, torch.finfo(logits.dtype).min), bias

    if model.post_process:
        model.output_layer.register_forward_hook(mask)


def _has_logits(config: McaModelConfig) -> bool:
    return config.head.num_labels is None


OUTPUT_BIAS = Feature(
    name="bias of the logits",
    enabled=lambda config: config.head.output_bias and _has_logits(config),
    finish=_add_bias,
)
LOGITS_SCALE = Feature(
    name="factor on logits, capped logits",
    enabled=lambda config: (
        config.head.logits_scaling != 1.0 or config.head.final_logit_softcapping is not None
    ),
    finish=_scale_logits,
)
PADDED_VOCABULARY = Feature(
    name="padded vocabulary",
    enabled=lambda config: config.padded_vocab_size != config.vocab_size and _has_logits(config),
    finish=_mask_padding,
)
CLASSIFICATION_HEAD = Feature(
    name="classification head", enabled=lambda config: not _has_logits(config), finish=_replace_head
)
