"""Settings of Megatron's ``TransformerConfig`` for execution: layout, precision, kernels, point-to-point communication.

Settings of the architecture are in `transformer_config`.
"""

import functools
import logging
from collections.abc import Mapping

import torch

from mca_config.arguments import DistributingParallelArguments, MegatronArguments
from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.features import active_features
from mca_models.megatron.names import Implementation
from mca_models.megatron.types import Settings

_log = logging.getLogger(__name__)
DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def _needs_sequence_parallel(
    config: McaModelConfig, args: DistributingParallelArguments
) -> tuple[str | None, bool]:
    """Return the part of the model that needs sequence parallelism at tp > 1, and whether Megatron insists on it."""
    for feature in active_features(config):
        if feature.sequence_parallel == "trained" and isinstance(args, MegatronArguments):
            return f"training a model with {feature.name}", True
        if feature.sequence_parallel == "always":
            return feature.name, False
    return None, False


def layout_settings(
    config: McaModelConfig, args: DistributingParallelArguments, layout: ParallelLayout
) -> Settings:
    """Return the parallel sizes; turn sequence parallelism on if the model needs it.

    Raises:
        McaError: ``sequence_parallel`` is off although the model needs it.
    """
    sequence_parallel = args.sequence_parallel_for(layout)
    why, required = _needs_sequence_parallel(config, args)
    if layout.tp == 1 or sequence_parallel:
        why = None
    if why and args.sequence_parallel is None:
        _log_once(f"sequence_parallel is on: {why} on several tensor ranks needs it")
        sequence_parallel = True
    elif why and required:
        raise McaError(
            f"sequence_parallel cannot be off: {why} on several tensor ranks needs it (Megatron rejects it "
            "otherwise); remove sequence_parallel"
        )
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline_model_parallel_size,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": sequence_parallel,
        "num_layers_in_first_pipeline_stage": layout.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": layout.num_layers_in_last_pipeline_stage,
        "account_for_embedding_in_pipeline_split": layout.account_for_embedding_in_pipeline_split,
        "account_for_loss_in_pipeline_split": layout.account_for_loss_in_pipeline_split,
        "pipeline_model_parallel_layout": layout.pipeline_model_parallel_layout,
    }


def precision_settings(dtype: str) -> Settings:
    """Return the dtypes of parameters and of point-to-point communication."""
    return {
        "params_dtype": DTYPES[dtype],
        "pipeline_dtype": DTYPES[dtype],
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
    }


def kernel_settings(implementation: Implementation) -> Settings:
    """Return the fusions, which need CUDA kernels; weights are always filled by mca, from a file or a seed."""
    fused = implementation == "transformer_engine"
    return {
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        "apply_rope_fusion": False,
        "persist_layer_norm": fused,
        "attention_softmax_in_fp32": True,
    }


def pipeline_settings(layout: ParallelLayout, version: tuple[int, ...], device: str) -> Settings:
    """Return the settings of point-to-point communication between pipeline stages.

    With virtual pipelining sends overlap, because batched ones give wrong numbers. Outputs are freed after sending only
    on CUDA, as gloo reads them later, and only where Megatron waits for its sends.
    """
    interleaved = layout.vpp > 1
    frees = device == "cuda" and waits_for_sends(layout, version)
    return {
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "deallocate_pipeline_outputs": layout.pp > 1 and frees,
    }


def waits_for_sends(layout: ParallelLayout, version: tuple[int, ...]) -> bool:
    """Return whether megatron-core of ``version`` waits for the send of an output before it frees the output."""
    return layout.vpp == 1 or version >= (0, 18)


def grouped_experts(settings: Settings, implementation: Implementation) -> bool:
    """Return whether experts use grouped GEMM: with Transformer Engine unless turned off, never locally."""
    requested = settings.get("moe_grouped_gemm")
    if implementation == "local":
        if requested and settings.get("num_moe_experts"):
            _log_once("moe_grouped_gemm is off: the local layers run experts one after the other")
        return False
    return requested is not False


@functools.cache
def _log_once(line: str) -> None:
    """Log ``line`` once: a configuration is made for checks, and again for the model."""
    _log.info(line)
