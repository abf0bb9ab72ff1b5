"""Activation memory of a decoder layer with Transformer Engine modules: the tensors that they save.

Each line names the file and the saved tensor (Transformer Engine 2.20); `test_te_saved.py` reads the installed source.
Nothing here was measured without a GPU.
"""

from mca_config.model_config import McaModelConfig
from mca_models.templates.parts.layer_costs import SINGLE, ExpertSizes, LatentSizes, SavedTensor
from mca_models.templates.parts.mamba import MAMBA_COSTS
from mca_models.templates.parts.mla import latent_sizes, saved_core
from mca_train.plan import local_layers
from mca_train.plan.local_layers import custom_activation, per_layer_input
from mca_train.plan.sizes import Sizes

_NORM_LINEAR = (
    "transformer_engine/pytorch/module/layernorm_linear.py: _LayerNormLinear (inputmat, ln_out_to_save)"
)
_NORM = "transformer_engine/pytorch/ops/basic/rmsnorm.py: forward (x, rstdevs)"
_LINEAR = "transformer_engine/pytorch/module/linear.py: _linear_setup_ctx (saved_inputmat)"
_PROJECTION = "megatron/core/transformer/attention.py: Attention (set_save_original_input)"
_GROUPED = "transformer_engine/pytorch/module/grouped_linear.py: _GroupedLinear (inputmats)"
_ATTENTION = (
    "transformer_engine/pytorch/attention/dot_product_attention/backends.py: _fused_attn_forward_impl "
    "(q, k, v, out, softmax_stats)"
)
_SWIGLU = "megatron/core/fusions/fused_bias_swiglu.py: SwiGLUFunction (input)"
_WEIGHTED = "megatron/core/fusions/fused_bias_swiglu.py: WeightedSwiGLUFunction (input, weights)"
_GLU = "megatron/core/transformer/mlp.py: forward (glu)"
_GATE = "megatron/core/transformer/attention.py: _apply_output_gate (x, gate)"
_DISPATCH = "megatron/core/transformer/moe/token_dispatcher.py: dispatch"
_ROUTER = "megatron/core/transformer/moe/router.py: routing"


def norm(
    tokens: float, channels: float, sizes: Sizes, *, output: bool = True, module: str = ""
) -> list[SavedTensor]:
    """Return the saved tensors of a norm that is not fused with the next linear layer.

    Recomputation avoids saving the output; the input is still saved.
    """
    lines = [SavedTensor("norm: input", tokens * channels * sizes.width, _NORM)]
    if output:
        lines.append(SavedTensor("norm: output", tokens * channels * sizes.width, _NORM, module))
    return lines


def layer(config: McaModelConfig, sizes: Sizes, number: int, *, worst: bool = False) -> list[SavedTensor]:
    """Return all saved tensors of decoder layer ``number``."""
    config = config.layer_config(number)
    hidden = config.hidden_size
    lines = per_layer_input(config, sizes)
    if config.norm.norm_placement == "sandwich":
        lines += [line for _ in range(2) for line in norm(sizes.split, hidden, sizes)]
    if config.has_attention(number):
        both = sizes.split * hidden * (sizes.width + sizes.gemm_input_width)
        lines.append(SavedTensor("input of attention, and normalized", both, _NORM_LINEAR))
        lines += attention(config, sizes, number)
    if sizes.moe is not None and config.is_moe_layer(number):
        before = norm(sizes.split, hidden, sizes, module="layernorm")
        if sizes.moe.post_norm:
            before += norm(sizes.split, hidden, sizes)
        return [*lines, *before, *experts(config, sizes.moe, sizes, worst=worst)]
    if not config.has_mlp(number):
        return lines
    lines.append(SavedTensor("input of the MLP", sizes.split * hidden * sizes.width, _NORM_LINEAR))
    normalised = sizes.split * hidden * sizes.gemm_input_width
    lines.append(SavedTensor("input of the MLP, normalized", normalised, _NORM_LINEAR, "mlp"))
    return lines + gated(config, config.mlp.ffn_hidden_size / sizes.layout.tp, sizes.tokens, sizes, "mlp")


def attention(config: McaModelConfig, sizes: Sizes, number: int) -> list[SavedTensor]:
    """Return the saved tensors of the attention of decoder layer ``number``, or of mca's mixer in its place."""
    if config.has_mixer(number):
        return local_layers.attention(config, sizes, number)
    mamba_lines = MAMBA_COSTS.saved(config, sizes) if config.has_parallel_mamba else []
    if (latent := latent_sizes(config)) is not None:
        return mamba_lines + _latent_attention(config, latent, sizes)
    query, key = local_layers.channels(config, sizes)
    lines: list[SavedTensor] = []
    if config.attention.qk_layernorm:  # copies its input out of the projection
        normalised = query + (0 if config.accepts_keys else key)
        lines = norm(sizes.tokens, normalised, sizes, output=False)
    if sizes.mca_attention:
        return mamba_lines + lines + local_layers.core(config, sizes, number)
    if config.attention.attention_output_gate:
        gate = sizes.tokens * query * (sizes.width + sizes.projection_input_width)
        lines.append(SavedTensor("output gate, and its input", gate, _GATE))
    return mamba_lines + lines + _core(config, sizes, query + key, key, query)


def _core(
    config: McaModelConfig, sizes: Sizes, rotated: float, value: float, out: float, module: str = ""
) -> list[SavedTensor]:
    """Return the saved tensors of the attention kernel, for which values are copied out of the projection."""
    tokens, width = sizes.tokens, sizes.width
    heads = config.attention.num_attention_heads / sizes.layout.tp
    lines = [
        SavedTensor("queries and keys", tokens * rotated * width, _ATTENTION, module),
        SavedTensor("values", tokens * value * width, _ATTENTION, module or "core_attn"),
        SavedTensor("log-sum-exp of attention", tokens * heads * SINGLE, _ATTENTION, "core_attn"),
        SavedTensor("attention's output", tokens * out * width, _ATTENTION),
    ]
    # otherwise it is the same tensor
    if sizes.projection_input_width < width and not config.attention.attention_output_gate:
        lines.append(
            SavedTensor("attention's output in fp8", tokens * out * sizes.projection_input_width, _PROJECTION)
        )
    return lines


def recomputed_core(config: McaModelConfig, sizes: Sizes, number: int) -> float:
    """Return the bytes that recomputed core attention saves in place of values: the projection that contains them."""
    config = config.layer_config(number)
    if not config.has_attention(number) or config.has_mixer(number) or latent_sizes(config) is not None:
        return 0.0
    if sizes.mca_attention:
        return local_layers.recomputed_core(config, sizes, number)
    query, key = local_layers.channels(config, sizes)
    gate = query if config.attention.attention_output_gate else 0.0
    return sizes.tokens * (query + gate + 2 * key) * sizes.width


def _latent_attention(config: McaModelConfig, latent: LatentSizes, sizes: Sizes) -> list[SavedTensor]:
    """Return the saved tensors of MLA: up-projections are copied into queries, keys and values and not saved."""
    ranks = sizes.split * sum(latent.ranks)
    lines = [
        SavedTensor("latent q and kv", ranks * sizes.width, _NORM_LINEAR),
        SavedTensor(
            "latent q and kv, normalized", ranks * sizes.gemm_input_width, _NORM_LINEAR, "mla_up_proj"
        ),
    ]
    if sizes.mca_attention:
        return lines + saved_core(config, sizes)
    heads = config.attention.num_attention_heads / sizes.layout.tp
    query, value = heads * latent.query, heads * latent.value
    return lines + _core(config, sizes, 2 * query, value, value, "mla_up_proj")


def gated(
    config: McaModelConfig, inner: float, tokens: float, sizes: Sizes, module: str
) -> list[SavedTensor]:
    """Return the saved tensors of an MLP with ``inner`` channels on this rank."""
    elements, first = tokens * inner, 2 if config.mlp.gated_linear_unit else 1
    lines = [
        SavedTensor("gate and up as projected", elements * first * sizes.width, _SWIGLU, module),
        SavedTensor("input of the second product", elements * sizes.gemm_input_width, _LINEAR, module),
    ]
    if config.mlp.gated_linear_unit and not sizes.fused_activation:
        lines.append(SavedTensor("activated gate, and up", elements * 2 * sizes.width, _GLU, module))
    return lines + custom_activation(config, elements, sizes, module)


def experts(
    config: McaModelConfig, moe: ExpertSizes, sizes: Sizes, *, worst: bool = False
) -> list[SavedTensor]:
    """Return the saved tensors of a layer's experts with grouped GEMMs."""
    sent, width = sizes.dispatched(worst=worst), sizes.width
    inner = moe.inner / sizes.layout.etp
    first = 2 if config.mlp.gated_linear_unit else 1
    lines = [
        SavedTensor("router", sizes.split * moe.choices * 10.0, _ROUTER, "moe"),
        SavedTensor(
            "tokens sent to experts",
            sent * moe.hidden * sizes.gemm_input_width,
            f"{_DISPATCH}; {_GROUPED}",
            "moe",
        ),
        SavedTensor("gate and up as projected", sent * inner * first * width, _WEIGHTED, "moe"),
        SavedTensor(
            "input of the second products", sent * inner * sizes.gemm_input_width, _GROUPED, "moe_act"
        ),
    ]
    if not sizes.fused_activation:  # both factors, and their product before probabilities
        kept = (2 if config.mlp.gated_linear_unit else 0) + 1
        lines.append(
            SavedTensor("activated, before probabilities", sent * inner * kept * width, _GLU, "moe_act")
        )
    if moe.shared:
        lines += gated(config, moe.shared / sizes.layout.tp, sizes.tokens, sizes, "shared_experts")
    return lines


def running(config: McaModelConfig, sizes: Sizes, number: int) -> tuple[float, float]:
    """Return the peak bytes of the layer's forward and backward passes, in addition to all saved tensors."""
    hidden, width = config.hidden_size, sizes.width
    between = sizes.split * hidden * width
    gathered = sizes.tokens * hidden * width if sizes.is_split else 0.0
    if sizes.moe is None or not config.is_moe_layer(number):
        if not config.has_mlp(number):
            return 2 * between + gathered, between + gathered
        inner = sizes.tokens * config.mlp.ffn_hidden_size / sizes.layout.tp * width
        return 2 * between + gathered, 2 * inner + between + gathered
    moved = sizes.dispatched() * sizes.moe.hidden * width * (3 if sizes.layout.etp == 1 else 6)
    return moved + 2 * between, moved + 2 * between
