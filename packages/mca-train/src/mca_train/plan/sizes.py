"""`Sizes` are the extents of what one rank computes for one micro-batch, and `Line` is a tensor that is kept of it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig, MlaMcaModelConfig, training_dtype

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments

EIGHTH, HALF, SINGLE = 1, 2, 4
"""Bytes of a number in fp8, in bf16 or fp16, and in fp32."""


def width_of(config: McaModelConfig, training: "TrainingArguments") -> int:
    """Bytes of a number of what is trained, or stands beside it frozen."""
    return SINGLE if training_dtype(config, training) == "float32" else HALF


@dataclass(frozen=True)
class Line:
    """What the backward pass of a layer needs of its forward pass.

    Args:
        what: In words.
        bytes: On this rank, of one micro-batch.
        source: Whose code keeps it: file and function.
        module: The name in ``recompute_modules`` that does away with it; empty: only full recomputation does.
    """

    what: str
    bytes: float
    source: str
    module: str = ""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of one micro-batch on one rank; numbers of elements, not bytes."""

    width: int
    """Bytes of a number."""
    operand: int
    """Those of a number that a product of Transformer Engine takes, as it is kept: fewer in fp8."""
    projected: int
    """Those that the projection behind attention keeps of its input: its own copy in fp8 with delayed scaling alone."""
    sequences: int
    length: int
    """Tokens of a sequence on this context rank."""
    tokens: int
    """`sequences` x `length`."""
    split: int
    """Those of them that stand on this tensor rank between the layers: fewer with sequence parallelism."""
    layout: ParallelLayout
    frozen: bool
    """Whether the base weights are, as under an adapter."""
    topk: int
    experts: int
    choices: int
    """What a token can be sent to: experts, and those without weights, to which it is not moved."""
    capacity: float | None
    """``moe_expert_capacity_factor``."""
    rms: bool
    """Whether norms only divide by a root mean square."""
    padded: bool
    """Whether each expert gets exactly its capacity, filled up."""
    own_attention: bool
    """Whether mca computes attention itself, also within Transformer Engine's layers."""
    fused_activation: bool
    """Whether Megatron has a kernel for what every MLP computes, where there is a GPU."""
    waits_for_sends: bool
    """Whether Megatron has sent an output before it frees it."""
    materialised: bool
    """Whether attention makes the whole matrix of its weights: on a CPU with dropout."""

    @classmethod
    def of(
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
        """Of a model that stands on its ``layout``.

        Args:
            config: The architecture.
            training: Training arguments.
            seq_length: Tokens of a sequence.
            micro_batch: Samples; None: as many as are trained at once.
            sequences: In a sample.
            frozen: Whether only an adapter is trained.
            on_gpu: Whether it runs there.
        """
        layout = config.layout
        length = seq_length // layout.cp
        count = (micro_batch or training.per_device_train_batch_size) * sequences
        tokens = count * length
        width = width_of(config, training)
        quantised = training.fp8 and not frozen  # an adapter takes what no cast has changed
        return cls(
            width=width,
            operand=EIGHTH if quantised else width,
            projected=EIGHTH if quantised and training.fp8_recipe in (None, "delayed") else width,
            sequences=count,
            length=length,
            tokens=tokens,
            split=tokens // layout.tp if cuts_sequences(config, training) else tokens,
            layout=layout,
            frozen=frozen,
            topk=config.moe_router_topk,
            experts=config.num_moe_experts or 0,
            choices=config.num_router_choices,
            capacity=training.moe_expert_capacity_factor,
            padded=bool(training.moe_pad_expert_input_to_capacity),
            own_attention=training.attention_backend == "local" or _has_own_core(config),
            fused_activation=training.bias_activation_fusion is not False and _is_fused(config),
            waits_for_sends=_waits_for_sends(layout),
            rms=config.normalization == "RMSNorm",
            materialised=config.attention_dropout > 0 and not on_gpu,
        )

    @property
    def moved(self) -> float:
        """How many experts a token is sent to, in the mean."""
        return self.topk * self.experts / max(self.choices, 1)

    @property
    def is_split(self) -> bool:
        """Whether sequences are cut over tensor ranks between the layers."""
        return self.split < self.tokens

    def dispatched(self, *, worst: bool = False) -> float:
        """Tokens (once for each of their experts) that this rank's experts get of all ranks of their group.

        Args:
            worst: All that could be sent here, not an equal share.
        """
        layout = self.layout
        here = self.split * self.moved
        if self.capacity is not None:  # each expert of each rank gets at most so many
            always = self.padded or worst
            here = here * self.capacity if always else min(here, here * self.capacity)
            return here * layout.etp
        if worst:
            here = self.split * min(self.topk, max(self.experts // layout.ep, 1)) * layout.ep
        return here * layout.etp


def cuts_sequences(config: McaModelConfig, training: "TrainingArguments") -> bool:
    """Whether sequence parallelism is on: as asked, else where experts or latent attention need it."""
    layout = config.layout
    if training.sequence_parallel is not None or layout.tp == 1:
        return bool(training.sequence_parallel) and layout.tp > 1
    return config.num_moe_experts is not None or isinstance(config, MlaMcaModelConfig)


def _has_own_core(config: McaModelConfig) -> bool:
    from mca_models.megatron.families.core_attention import custom_core_attention

    return custom_core_attention(config) is not None


def _is_fused(config: McaModelConfig) -> bool:
    from mca_models.megatron.families.settings import has_fused_activation

    return has_fused_activation(config)


def _waits_for_sends(layout: ParallelLayout) -> bool:
    from mca_models.megatron import platform
    from mca_models.megatron.factory.execution import waits_for_sends

    return waits_for_sends(layout, platform.megatron_version())
