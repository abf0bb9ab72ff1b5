"""Sizes of one rank's computation for one micro-batch, from the training arguments."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig, training_dtype
from mca_models.megatron import platform
from mca_models.megatron.factory.limits import waits_for_sends
from mca_models.megatron.features.features import active_features
from mca_models.megatron.features.mlp import has_fused_activation
from mca_models.templates.parts.layer_costs import EIGHTH, HALF, SINGLE, LayerSizes
from mca_models.templates.parts.moe import expert_sizes

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments


def element_bytes(config: McaModelConfig, training: "TrainingArguments") -> int:
    """Return the bytes per element of model weights, trained or frozen."""
    return SINGLE if training_dtype(config, training) == "float32" else HALF


@dataclass(frozen=True, kw_only=True)
class Sizes(LayerSizes):
    """Sizes of one micro-batch in training."""

    @classmethod
    def for_training(
        cls,
        config: McaModelConfig,
        training: "TrainingArguments",
        seq_length: int,
        *,
        micro_batch: int | None = None,
        sequences: int = 1,
        frozen: bool = False,
        on_gpu: bool = False,
    ) -> "Sizes":
        """Return the sizes of a model with its ``layout``.

        Args:
            config: Model configuration.
            training: Training arguments.
            seq_length: Tokens of a sequence.
            micro_batch: Samples per micro-batch; None: ``per_device_train_batch_size``.
            sequences: Sequences per sample.
            frozen: Only an adapter is trained.
            on_gpu: The run is on a GPU.
        """
        layout = config.layout
        length = seq_length // layout.cp
        count = (micro_batch or training.per_device_train_batch_size) * sequences
        tokens = count * length
        width = element_bytes(config, training)
        quantised = training.fp8 and not frozen  # an adapter takes inputs that are not cast
        return cls(
            width=width,
            gemm_input_width=EIGHTH if quantised else width,
            projection_input_width=EIGHTH
            if quantised and training.fp8_recipe in (None, "delayed")
            else width,
            sequences=count,
            length=length,
            tokens=tokens,
            split=tokens // layout.tp if has_sequence_parallel(config, training) else tokens,
            layout=layout,
            frozen=frozen,
            moe=expert_sizes(config),
            capacity=training.moe_expert_capacity_factor,
            padded=bool(training.moe_pad_expert_input_to_capacity),
            mca_attention=training.attention_backend == "local"
            or any(feature.core_attention is not None for feature in active_features(config)),
            fused_activation=training.bias_activation_fusion is not False and has_fused_activation(config),
            waits_for_sends=_waits_for_sends(layout),
            rms=config.norm.normalization == "RMSNorm",
            has_attention_matrix=config.attention.attention_dropout > 0 and not on_gpu,
        )


def has_sequence_parallel(config: McaModelConfig, training: "TrainingArguments") -> bool:
    """Return True if sequence parallelism is enabled, explicitly or because the model needs it."""
    layout = config.layout
    if training.sequence_parallel is not None or layout.tp == 1:  # one rank has all tokens anyway
        return bool(training.sequence_parallel)
    return any(feature.sequence_parallel for feature in active_features(config))


def _waits_for_sends(layout: ParallelLayout) -> bool:
    return waits_for_sends(layout, platform.megatron_version())
