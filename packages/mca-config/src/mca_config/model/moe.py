"""Mixture of experts: experts, router and shared expert."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from mca_config.model.section import (
    LARGEST,
    Experts,
    ModelSizes,
    NotNegative,
    Range,
    Section,
    Share,
    Width,
    require_entries,
    require_matrix,
)

_MOST_MLPS = 1 << 16
"""Largest product of layers and experts; DeepSeek V3 has 15,616."""


@dataclass(frozen=True, kw_only=True)
class Moe(Section):
    """MoE layers."""

    num_moe_experts: Experts
    moe_layer_freq: tuple[int, ...] | None = None
    """1 for each decoder layer with experts, 0 for a dense one; None: all layers have experts."""
    moe_ffn_hidden_size: Width | None = None
    moe_latent_size: Width | None = None
    """Input and output size of routed experts, with projections from and to ``hidden_size``; None: no projections."""
    moe_router_topk: Experts = 2
    moe_router_pre_softmax: bool = False
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_enable_expert_bias: bool = False
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_group_score: Literal["top_sum", "max"] = "top_sum"
    """Score of an expert group: the sum of its two highest expert scores, or its highest one."""
    moe_router_topk_scaling_factor: float | None = None
    moe_router_normalised: bool = True
    """The sigmoid scores of a token's experts are divided by their sum."""
    sparse_mixer_jitter: NotNegative | None = None
    """Threshold of SparseMixer, which in training samples two experts near the highest logit; None: top-k router."""
    input_jitter_noise: Share = 0.0
    """Noise on the inputs of a SparseMixer router and of its experts in training."""
    moe_apply_probs_on_input: bool = False
    """The router weight multiplies the input of an expert instead of its output."""
    moe_shared_expert_intermediate_size: Annotated[int, Range(least=0, most=LARGEST)] | None = None
    moe_shared_expert_gate: bool = False
    moe_shared_expert_mean: bool = False
    """The outputs of the shared expert and the routed experts are averaged instead of added."""
    moe_parallel_dense_mlp: bool = False
    """The shared expert is the layer's MLP: it and the routed experts have separate norms, and the router has learned
    factors."""
    moe_post_norm: bool = False
    """A norm of the output of an MoE layer, before it is added to the residual."""
    moe_shortcut: bool = False
    """Shortcut MoE: layers form pairs, and the routed output of the first layer is added after the second layer, while
    the output of its MLP, the shared expert, is added at once."""
    moe_identity_experts: Annotated[int, Range(least=0, most=1 << 16)] = 0
    """Identity (zero-compute) experts without weights; they come after the other experts in the router."""
    moe_aux_loss_coeff: float = 0.0
    """HF's ``router_aux_loss_coef``, for one loss over all layers; the arguments have Megatron's, for each layer."""
    moe_router_load_balancing_type: str = "none"

    @property
    def num_router_choices(self) -> int:
        """Outputs of the router: experts with weights and identity experts."""
        return self.num_moe_experts + self.moe_identity_experts

    def problems(self, model: ModelSizes) -> Iterator[str]:
        """Yield sizes that do not fit the layers, and weights that are too large."""
        layers, identity = model.num_layers, self.moe_identity_experts
        yield from require_entries("moe_layer_freq", self.moe_layer_freq, layers)
        if self.moe_shortcut and layers % 2:
            yield (
                f"num_layers is {layers} with moe_shortcut, which needs pairs of layers; expected an even number"
            )
        if layers * self.num_router_choices > _MOST_MLPS:
            sum_of = f" plus moe_identity_experts {identity}" if identity else ""
            experts = f"num_moe_experts {self.num_moe_experts}{sum_of}"
            yield f"num_layers {layers} times {experts} must be at most {_MOST_MLPS}"
        hidden = "hidden_size", model.hidden_size
        yield from require_matrix(hidden, ("moe_ffn_hidden_size", self.moe_ffn_hidden_size))
