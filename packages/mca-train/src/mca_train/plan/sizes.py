"""Sizes of one rank's computation for one micro-batch, and the tensors that it saves."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig, training_dtype
from mca_models.megatron import platform
from mca_models.megatron.factory.execution import waits_for_sends
from mca_models.megatron.features.mlp import has_fused_activation
from mca_models.megatron.features.spec import has_custom_core_attention

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments

EIGHTH, HALF, SINGLE = 1, 2, 4
"""Bytes per element in fp8, in bf16 or fp16, and in fp32."""


def element_bytes(config: McaModelConfig, training: "TrainingArguments") -> int:
    """Return the bytes per element of model weights, trained or frozen."""
    return SINGLE if training_dtype(config, training) == "float32" else HALF


@dataclass(frozen=True)
class SavedTensor:
    """Tensor that the forward pass of a layer saves for its backward pass.

    Args:
        what: Description.
        bytes: Bytes of one micro-batch on this rank.
        source: File and function that save it.
        module: Name in ``recompute_modules`` that avoids it; empty: only full recomputation does.
    """

    what: str
    bytes: float
    source: str
    module: str = ""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of one micro-batch on one rank, in elements unless noted otherwise."""

    width: int
    """Bytes per element."""
    gemm_input_width: int
    """Bytes per element of a saved input of a Transformer Engine GEMM: 1 in fp8."""
    projection_input_width: int
    """Bytes per element of the output projection's saved input: a separate fp8 copy only with delayed scaling."""
    sequences: int
    length: int
    """Tokens of a sequence on this context-parallel rank."""
    tokens: int
    """`sequences` x `length`."""
    split: int
    """Tokens on this tensor-parallel rank between layers: fewer with sequence parallelism."""
    layout: ParallelLayout
    frozen: bool
    """Base weights are frozen, as with an adapter."""
    topk: int
    experts: int
    choices: int
    """Number of router choices: experts and identity experts, which receive no tokens."""
    capacity: float | None
    """``moe_expert_capacity_factor``."""
    rms: bool
    """Norms are RMSNorm."""
    padded: bool
    """Experts are padded to their exact capacity."""
    mca_attention: bool
    """mca computes core attention, also within Transformer Engine layers."""
    fused_activation: bool
    """Megatron has a fused kernel for the MLP activation on a GPU."""
    waits_for_sends: bool
    """Megatron waits for a send before it frees the output."""
    has_attention_matrix: bool
    """Attention creates the full matrix of weights: on a CPU with dropout."""

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
            topk=0 if config.moe is None else config.moe.moe_router_topk,
            experts=config.num_experts,
            choices=0 if config.moe is None else config.moe.num_router_choices,
            capacity=training.moe_expert_capacity_factor,
            padded=bool(training.moe_pad_expert_input_to_capacity),
            mca_attention=training.attention_backend == "local" or _has_mca_core_attention(config),
            fused_activation=training.bias_activation_fusion is not False and _is_fused(config),
            waits_for_sends=_waits_for_sends(layout),
            rms=config.norm.normalization == "RMSNorm",
            has_attention_matrix=config.attention.attention_dropout > 0 and not on_gpu,
        )

    @property
    def experts_per_token(self) -> float:
        """Mean number of experts that a token is sent to."""
        return self.topk * self.experts / max(self.choices, 1)

    @property
    def is_split(self) -> bool:
        """True if sequences are sharded over tensor-parallel ranks between layers."""
        return self.split < self.tokens

    def dispatched(self, *, worst: bool = False) -> float:
        """Return the number of token-expert pairs that this rank's experts receive from all ranks of their group.

        Args:
            worst: Count all pairs that could be routed here, not an equal share.
        """
        layout = self.layout
        here = self.split * self.experts_per_token
        if self.capacity is not None:  # limits the tokens per expert and rank
            always = self.padded or worst
            here = here * self.capacity if always else min(here, here * self.capacity)
            return here * layout.etp
        if worst:
            here = self.split * min(self.topk, max(self.experts // layout.ep, 1)) * layout.ep
        return here * layout.etp


def has_sequence_parallel(config: McaModelConfig, training: "TrainingArguments") -> bool:
    """Return True if sequence parallelism is enabled, explicitly or because MoE or MLA needs it."""
    layout = config.layout
    if training.sequence_parallel is not None or layout.tp == 1:
        return bool(training.sequence_parallel) and layout.tp > 1
    return config.moe is not None or config.mla is not None


def _has_mca_core_attention(config: McaModelConfig) -> bool:
    return has_custom_core_attention(config)


def _is_fused(config: McaModelConfig) -> bool:
    return has_fused_activation(config)


def _waits_for_sends(layout: ParallelLayout) -> bool:
    return waits_for_sends(layout, platform.megatron_version())
