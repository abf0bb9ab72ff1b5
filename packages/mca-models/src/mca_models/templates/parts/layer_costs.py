"""Costs of a layer on one rank: saved tensors, weights of GEMMs and FLOPs, with the sizes that they depend on.

Costs of a part are in its module; `mca_train.plan` adds them up.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig

EIGHTH, HALF, SINGLE = 1, 2, 4
"""Bytes per element in fp8, in bf16 or fp16, and in fp32."""
CHUNK = 64
"""Tokens per chunk of the gated delta rule and of Mamba."""
_NORM = "mca_models/megatron/layers/norm.py: Norm.forward"


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
class ExpertSizes:
    """Sizes of the MoE layers of a model, before sharding."""

    experts: int
    """Experts with weights."""
    choices: int
    """Router choices: experts, and identity experts, which receive no tokens."""
    topk: int
    """Choices of a token."""
    hidden: int
    """Input channels of a routed expert."""
    inner: int
    """Channels between the linear layers of a routed expert."""
    shared: int
    """Channels between the linear layers of the shared expert; 0: there is none."""
    dense_mlp: bool
    """The shared expert is the layer's MLP, in parallel to the routed experts and with separate norms."""
    post_norm: bool
    """The output of an MoE layer is normalized."""
    shortcut: bool
    """Layers form pairs: routed outputs of the first layer are added after the second."""


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Sizes of attention whose queries, keys and values are projected up from latent vectors, before sharding."""

    ranks: tuple[int, ...]
    """Channels of the latent vectors."""
    query: int
    """Channels of a query or key head."""
    value: int
    """Channels of a value head."""
    down: int
    """Elements of the projections to latent vectors."""
    per_head: int
    """Elements of the other projections of a head."""


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
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
    moe: ExpertSizes | None
    """Sizes of the MoE layers; None: there are none."""
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

    @property
    def experts_per_token(self) -> float:
        """Mean number of experts that a token is sent to."""
        return 0.0 if self.moe is None else self.moe.topk * self.moe.experts / max(self.moe.choices, 1)

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
        if worst and self.moe is not None:
            here = self.split * min(self.moe.topk, max(self.moe.experts // layout.ep, 1)) * layout.ep
        return here * layout.etp


@dataclass(frozen=True)
class MixerCosts:
    """Costs of a module in place of attention.

    Args:
        saved: Saved tensors.
        weights: Elements of its GEMMs on this rank.
        flops: FLOPs of its forward pass in addition to GEMMs.
    """

    saved: Callable[[McaModelConfig, LayerSizes], list[SavedTensor]]
    weights: Callable[[McaModelConfig, LayerSizes], float]
    flops: Callable[[McaModelConfig, LayerSizes], float]


def norm(
    tokens: float, channels: float, sizes: LayerSizes, *, output: bool = True, module: str = ""
) -> list[SavedTensor]:
    """Return the saved tensors of a norm, which computes in fp32 and so saves a copy of a half-precision input."""
    trained, half = not sizes.frozen, sizes.width < SINGLE
    lines = [SavedTensor("norm: input in fp32", tokens * channels * SINGLE, _NORM, module if half else "")]
    if trained and sizes.rms:
        lines.append(SavedTensor("norm: normalized in fp32", tokens * channels * SINGLE, _NORM, module))
    if output:
        lines.append(SavedTensor("norm: output", tokens * channels * sizes.width, _NORM, module))
    return lines
