"""The architecture of a model as data, under Megatron's field names, with no Megatron import."""

from dataclasses import dataclass, field
from typing import Any, Literal

from mca_config.layout import ParallelLayout


@dataclass(frozen=True, kw_only=True)
class McaModelConfig:
    """One model: what its weights look like and how its layers compute.

    Fields carry Megatron's ``TransformerConfig`` names; those that Megatron takes elsewhere carry HF's.
    Values are resolved: no field means "look it up in the HF config".
    """

    model_type: str
    """HF ``model_type``; names the template."""
    num_layers: int
    """Decoder layers, multi-token-prediction layers not counted."""
    hidden_size: int
    ffn_hidden_size: int
    """Width of the dense MLP (of one gate or up half)."""
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads."""
    kv_channels: int
    """Head dimension."""
    vocab_size: int
    """True vocabulary rows, before padding to a multiple of tp."""
    max_position_embeddings: int
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype of the weights on disk."""

    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    layernorm_epsilon: float = 1e-6
    layernorm_zero_centered_gamma: bool = False
    gated_linear_unit: bool = True
    hidden_act: str = "silu"
    """HF activation name."""
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    tie_word_embeddings: bool = False
    """The output layer shares the embedding's weight."""
    init_method_std: float = 0.02
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0

    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    rope_scaling: dict[str, Any] | None = None
    """HF's rope parameters without ``rope_theta`` (``rope_type``, ``factor``, ...); None: unscaled."""
    window_size: int | None = None
    """Tokens each query sees in a sliding-window layer, itself included; None: all before it."""
    layer_types: tuple[str, ...] | None = None
    """HF's kind of each decoder layer (``full_attention``, ``sliding_attention``, ``linear_attention``);
    None: all alike (sliding if ``window_size``)."""

    num_moe_experts: int | None = None
    moe_layer_freq: tuple[int, ...] | None = None
    """1 for each decoder layer with experts, 0 for a dense one; None: all as ``num_moe_experts`` says."""
    moe_ffn_hidden_size: int | None = None
    moe_router_topk: int = 2
    moe_router_pre_softmax: bool = False
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_enable_expert_bias: bool = False
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_topk_scaling_factor: float | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_aux_loss_coeff: float = 0.0
    moe_router_load_balancing_type: str = "none"
    mtp_num_layers: int = 0

    extra: dict[str, Any] = field(default_factory=dict)
    """Family-specific facts that have no Megatron name, under HF's names."""
    hf_config: dict[str, Any] = field(default_factory=dict)
    """The source ``config.json`` verbatim; export starts from it, so unknown fields survive."""
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    """The parallel sizes a checkpoint was written with."""

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder ``layer`` has experts."""
        if self.num_moe_experts is None:
            return False
        return self.moe_layer_freq is None or bool(self.moe_layer_freq[layer])


@dataclass(frozen=True, kw_only=True)
class MlaMcaModelConfig(McaModelConfig):
    """A model with multi-head latent attention."""

    q_lora_rank: int | None = None
    kv_lora_rank: int
    qk_head_dim: int
    """No-rope channels of a query or key head."""
    qk_pos_emb_head_dim: int
    v_head_dim: int
