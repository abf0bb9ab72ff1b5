"""What a decoder layer of Transformer Engine's modules keeps for its backward pass, by what those modules save.

Each line names the file and what is saved there (Transformer Engine 2.20): `integration_tests/test_te_saved.py` reads
the installed source. Nothing here could be measured without a GPU.
"""

from mca_config.model_config import McaModelConfig, MlaMcaModelConfig
from mca_train.plan import local_layers
from mca_train.plan.local_layers import own_activation, per_layer_input, state_space
from mca_train.plan.sizes import SINGLE, Line, Sizes

_NORM_LINEAR = (
    "transformer_engine/pytorch/module/layernorm_linear.py: _LayerNormLinear (inputmat, ln_out_to_save)"
)
_NORM = "transformer_engine/pytorch/ops/basic/rmsnorm.py: forward (x, rstdevs)"
_LINEAR = "transformer_engine/pytorch/module/linear.py: _linear_setup_ctx (saved_inputmat)"
_GROUPED = "transformer_engine/pytorch/module/grouped_linear.py: _GroupedLinear (inputmats)"
_ATTENTION = (
    "transformer_engine/pytorch/attention/dot_product_attention/backends.py: _fused_attn_forward_impl "
    "(q, k, v, out, softmax_stats)"
)
_SWIGLU = "megatron/core/fusions/fused_bias_swiglu.py: SwiGLUFunction (input)"
_WEIGHTED = "megatron/core/fusions/fused_bias_swiglu.py: WeightedSwiGLUFunction (input, weights)"
_MOVE = "megatron/core/transformer/moe/token_dispatcher.py: dispatch"
_ROUTER = "megatron/core/transformer/moe/router.py: routing"


def norm(tokens: float, channels: float, sizes: Sizes) -> list[Line]:
    """Of a norm that is not fused with the linear behind it: its input, and its output as that linear's input."""
    return [
        Line("norm: input", tokens * channels * sizes.width, _NORM, "layernorm"),
        Line("norm: output", tokens * channels * sizes.width, _NORM, "layernorm"),
    ]


def layer(config: McaModelConfig, sizes: Sizes, number: int, *, worst: bool = False) -> list[Line]:
    """All lines of decoder layer ``number``."""
    config = config.of_layer(number)
    both = sizes.split * config.hidden_size * (sizes.width + sizes.operand)
    lines = per_layer_input(config, sizes)
    if config.norm_placement == "sandwich":
        lines += [line for _ in range(2) for line in norm(sizes.split, config.hidden_size, sizes)]
    if config.has_attention(number):
        lines.append(Line("input of attention, and normalised", both, _NORM_LINEAR))
        states = config.is_mamba_layer(number)
        lines += state_space(config, sizes) if states or config.mamba_beside_attention else []
        lines += [] if states else attention(config, sizes)
    if config.is_moe_layer(number):
        return [*lines, *norm(sizes.split, config.hidden_size, sizes), *experts(config, sizes, worst=worst)]
    if not config.has_mlp(number):
        return lines
    lines.append(Line("input of the MLP, and normalised", both, _NORM_LINEAR))
    return lines + gated(config, config.ffn_hidden_size / sizes.layout.tp, sizes.tokens, sizes, "mlp")


def attention(config: McaModelConfig, sizes: Sizes) -> list[Line]:
    """Of attention; of a delta net as of attention with as many channels."""
    tokens, width, tp = sizes.tokens, sizes.width, sizes.layout.tp
    heads = config.num_attention_heads / tp
    if isinstance(config, MlaMcaModelConfig):
        query = key = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
        value = out = heads * config.v_head_dim
    else:
        query = out = heads * config.kv_channels
        key = value = max(config.num_query_groups / tp, 1) * config.kv_channels
    lines = [
        Line("queries, keys, values", tokens * (query + key + value) * width, _ATTENTION, "core_attn"),
        Line("sums of attention", tokens * heads * SINGLE, _ATTENTION, "core_attn"),
        Line("attention's output", tokens * out * width, _ATTENTION),
    ]
    if sizes.operand < width:  # else it is the same tensor
        lines.append(Line("attention's output in fp8", tokens * out * sizes.operand, _LINEAR))
    if config.qk_layernorm and not isinstance(config, MlaMcaModelConfig):
        lines.append(Line("q, k, v as projected", tokens * (query + key + value) * width, _NORM))
    if isinstance(config, MlaMcaModelConfig):
        ranks = (config.q_lora_rank or 0) + config.kv_lora_rank
        lines.append(
            Line(
                "latent q and kv, and normalised", sizes.split * ranks * (width + sizes.operand), _NORM_LINEAR
            )
        )
        lines.append(
            Line("keys and values as projected", tokens * (key + value) * width, _LINEAR, "mla_up_proj")
        )
    return lines


def gated(config: McaModelConfig, inner: float, tokens: float, sizes: Sizes, module: str) -> list[Line]:
    """Of an MLP with ``inner`` channels on this rank, its activation fused."""
    if config.mlp_multipliers is not None:  # which no fused activation has
        return local_layers.gated(config, inner, tokens, sizes, module)
    first = 2 if config.gated_linear_unit else 1
    return [
        Line("gate and up as projected", tokens * inner * first * sizes.width, _SWIGLU, module),
        Line("input of the second product", tokens * inner * sizes.operand, _LINEAR, module),
        *own_activation(config, tokens * inner, sizes, module),
    ]


def experts(config: McaModelConfig, sizes: Sizes, *, worst: bool = False) -> list[Line]:
    """Of a layer's experts in grouped products."""
    sent, width = sizes.dispatched(worst=worst), sizes.width
    inner = (config.moe_ffn_hidden_size or config.ffn_hidden_size) / sizes.layout.etp
    first = 2 if config.gated_linear_unit else 1
    lines = [
        Line("router", sizes.split * config.num_router_choices * 10.0, _ROUTER),
        Line(
            "tokens sent to experts",
            sent * (config.moe_latent_size or config.hidden_size) * sizes.operand,
            f"{_MOVE}; {_GROUPED}",
            "moe",
        ),
        Line("gate and up as projected", sent * inner * first * width, _WEIGHTED, "moe"),
        Line("input of the second products", sent * inner * sizes.operand, _GROUPED, "moe_act"),
    ]
    if shared := config.moe_shared_expert_intermediate_size:
        lines += gated(config, shared / sizes.layout.tp, sizes.tokens, sizes, "shared_experts")
    return lines


def running(config: McaModelConfig, sizes: Sizes, number: int) -> tuple[float, float]:
    """Bytes that the worst moment of the layer's forward and of its backward takes above all that is kept."""
    hidden, width = config.hidden_size, sizes.width
    between = sizes.split * hidden * width
    gathered = sizes.tokens * hidden * width if sizes.is_split else 0.0
    if not config.is_moe_layer(number):
        if not config.has_mlp(number):
            return 2 * between + gathered, between + gathered
        inner = sizes.tokens * config.ffn_hidden_size / sizes.layout.tp * width
        return 2 * between + gathered, 2 * inner + between + gathered
    moved = (
        sizes.dispatched() * (config.moe_latent_size or hidden) * width * (3 if sizes.layout.etp == 1 else 6)
    )
    return moved + 2 * between, moved + 2 * between
