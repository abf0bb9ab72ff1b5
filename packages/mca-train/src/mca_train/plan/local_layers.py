"""Activation memory of a decoder layer in Megatron's local implementation: saved tensors and peaks.

The lines are taken from dry runs, which count what the engine allocates; `test_plan_truth.py` compares the two.
"""

from collections.abc import Mapping

from mca_config.model_config import McaModelConfig
from mca_models.templates.parts.gated_delta_net import DELTA_NET_COSTS
from mca_models.templates.parts.layer_costs import CHUNK, SINGLE, ExpertSizes, MixerCosts, SavedTensor, norm
from mca_models.templates.parts.lightning_attention import LIGHTNING_COSTS
from mca_models.templates.parts.mamba import MAMBA_COSTS, num_heads
from mca_models.templates.parts.mla import latent_sizes, saved_core
from mca_models.templates.parts.selective_scan import SCAN_COSTS
from mca_models.templates.parts.short_convolution import CONVOLUTION_COSTS
from mca_train.plan.sizes import Sizes

MIXERS: Mapping[str, MixerCosts] = {
    "linear_attention": DELTA_NET_COSTS,
    "lightning": LIGHTNING_COSTS,
    "mamba": MAMBA_COSTS,
    "selective_scan": SCAN_COSTS,
    "conv": CONVOLUTION_COSTS,
}
"""Costs of modules in place of attention by layer type."""
_SDPA = "mca_models/megatron/layers/sdpa.py: scaled_dot_product_attention"
_QUERY_BLOCK = 512
"""Queries per block of local attention."""
_DROP = "megatron/core/fusions/fused_bias_dropout.py"
_ROPE = "megatron/core/models/common/embeddings/rope_utils.py: apply_rotary_pos_emb"
_MLP = "megatron/core/transformer/mlp.py: MLP.forward (glu)"
_DISPATCH = "megatron/core/transformer/moe/token_dispatcher.py: dispatch"
_ROUTER = "megatron/core/transformer/moe/router.py: routing"
_PER_LAYER = "mca_models/megatron/features/per_layer_embedding.py: _add_input"


def mixer_costs(config: McaModelConfig, number: int) -> MixerCosts | None:
    """Return the costs of the module in place of attention in decoder layer ``number``; None: it has attention."""
    return MIXERS.get(config.layer_types[number]) if config.layer_types else None


def layer(config: McaModelConfig, sizes: Sizes, number: int, *, worst: bool = False) -> list[SavedTensor]:
    """Return all saved tensors of decoder layer ``number``."""
    config = config.layer_config(number)
    hidden = config.hidden_size
    halves = range(config.has_attention(number) + config.has_mlp(number))
    lines = [line for _ in halves for line in norm(sizes.split, hidden, sizes, module="layernorm")]
    moe = sizes.moe
    if moe is not None and moe.dense_mlp:  # each has a norm before and after it, and the router has one
        lines += [line for _ in range(3) for line in norm(sizes.split, hidden, sizes)]
        lines.append(SavedTensor("router: input", sizes.split * hidden * (SINGLE + 2 * sizes.width), _ROUTER))
    if config.norm.norm_placement == "sandwich":
        lines += [line for _ in halves for line in norm(sizes.split, hidden, sizes)]
    if config.has_attention(number):
        lines += attention(config, sizes, number)
    lines += per_layer_input(config, sizes)
    if config.block.hidden_dropout:
        lines.append(SavedTensor("dropout mask", 2.0 * sizes.split * hidden, _DROP))
    if moe is not None and config.is_moe_layer(number):
        if moe.post_norm:
            lines += norm(sizes.split, hidden, sizes)
        return lines + experts(config, moe, sizes, worst=worst)
    if not config.has_mlp(number):
        return lines
    return lines + gated(config, config.mlp.ffn_hidden_size / sizes.layout.tp, sizes.tokens, sizes, "mlp")


def attention(config: McaModelConfig, sizes: Sizes, number: int) -> list[SavedTensor]:
    """Return the saved tensors of the attention of decoder layer ``number``."""
    if (mixer := mixer_costs(config, number)) is not None:
        return mixer.saved(config, sizes)
    if (latent := latent_sizes(config)) is not None:
        norms = [line for rank in latent.ranks for line in norm(sizes.split, rank, sizes)]
        return saved_core(config, sizes) + norms
    lines = MAMBA_COSTS.saved(config, sizes) if config.has_parallel_mamba else []
    query, key = channels(config, sizes)
    if config.attention.qk_layernorm:
        normalised = query + (0 if config.accepts_keys else key)
        lines += norm(sizes.tokens, normalised, sizes, output=False)
    return lines + core(config, sizes, number)


def channels(config: McaModelConfig, sizes: Sizes) -> tuple[float, float]:
    """Return the channels of queries, and of keys or values, on this rank."""
    tp = sizes.layout.tp
    query = config.attention.num_attention_heads * config.attention.kv_channels / tp
    return query, max(config.attention.num_query_groups / tp, 1) * config.attention.kv_channels


def core(config: McaModelConfig, sizes: Sizes, number: int) -> list[SavedTensor]:
    """Return the saved tensors of mca's core attention, after the query and key norms."""
    width, tokens = sizes.width, sizes.tokens
    query, key = channels(config, sizes)
    lines = [SavedTensor("queries", tokens * query * width, _ROPE)]
    if key < query:  # a copy of each key and value for each head of its group
        copies = _num_keys(sizes) * query * 2 * width
        lines.append(SavedTensor("keys and values of every head", copies, _SDPA, "core_attn"))
    else:
        lines.append(
            SavedTensor("keys, and q, k, v as projected", tokens * (2 * key + query + key) * width, _SDPA)
        )
    if config.attention.attention_output_gate:
        lines.append(SavedTensor("output gate", tokens * query * 2 * width, _SDPA))
    return lines + _scores(config, sizes, query) + _sliding_window_mask(config, sizes, number)


def recomputed_core(config: McaModelConfig, sizes: Sizes, number: int) -> float:
    """Return the bytes that recomputed core attention still saves: unexpanded keys, and the source of values."""
    config = config.layer_config(number)
    states = config.has_mixer(number)
    query, key = channels(config, sizes)
    latent = latent_sizes(config)
    if not config.has_attention(number) or states or latent is not None or key >= query:
        return 0.0
    return sizes.tokens * (query + 3 * key) * sizes.width


def per_layer_input(config: McaModelConfig, sizes: Sizes) -> list[SavedTensor]:
    """Return the saved tensors of a layer's per-layer embedding; the embedding itself is saved once for all layers."""
    if not config.per_layer_input_size:
        return []
    embedding = sizes.split * config.per_layer_input_size * sizes.width
    return [
        SavedTensor("input of the gate", sizes.split * config.hidden_size * sizes.width, _PER_LAYER),
        SavedTensor("gate, its activation, and the gated embedding", 3 * embedding, _PER_LAYER),
        *norm(sizes.split, config.hidden_size, sizes, output=False),
    ]


def _num_keys(sizes: Sizes) -> float:
    """Number of keys that are expanded: those before each of the two slices of a context-parallel rank."""
    cp = sizes.layout.cp
    return sizes.tokens if cp == 1 else sizes.tokens * cp * (2 * cp + 1) / (2 * cp)


def _scores(config: McaModelConfig, sizes: Sizes, output: float) -> list[SavedTensor]:
    tokens, cp = sizes.tokens, sizes.layout.cp
    heads = config.attention.num_attention_heads / sizes.layout.tp
    lines = [SavedTensor("attention's output", tokens * output * sizes.width * (1 if cp == 1 else 2), _SDPA)]
    lines.append(SavedTensor("log-sum-exp of attention", tokens * heads * SINGLE, _SDPA, "core_attn"))
    if cp > 1:
        mask = (sizes.length / 2) ** 2 * 2 * cp * sizes.width
        lines.append(SavedTensor("mask of a slice", mask, _SDPA, "core_attn"))
    if sizes.has_attention_matrix:
        weights = sizes.tokens * sizes.length * heads  # softmax, mask and product, in fp32
        lines.append(SavedTensor("attention weights and dropout", weights * 3 * SINGLE, _SDPA, "core_attn"))
    return lines


def sliding_window(config: McaModelConfig, number: int, length: int) -> int | None:
    """Return the window of decoder layer ``number`` if it is shorter than a sequence of ``length`` tokens."""
    sliding = config.layer_types is None or config.layer_types[number] == "sliding_attention"
    window = config.attention.window_size
    return window if sliding and window is not None and window < length else None


def _sliding_window_mask(config: McaModelConfig, sizes: Sizes, number: int) -> list[SavedTensor]:
    """Return the mask of a block of queries, shared by all blocks."""
    if (window := sliding_window(config, number, sizes.length)) is None:
        return []
    rows = min(_QUERY_BLOCK, sizes.length)
    columns = min(sizes.length, rows + window - 1)
    return [SavedTensor("sliding-window mask", float(rows * columns * sizes.width), _SDPA, "core_attn")]


def gated(
    config: McaModelConfig, inner: float, tokens: float, sizes: Sizes, module: str
) -> list[SavedTensor]:
    """Return the saved tensors of an MLP with ``inner`` channels on this rank."""
    if not config.mlp.gated_linear_unit:
        activation = custom_activation(config, tokens * inner, sizes, module)
        return [
            SavedTensor(
                "first projection and its activation", tokens * inner * 2 * sizes.width, _MLP, module
            ),
            *activation,
        ]
    return [
        SavedTensor("gate and up as projected", tokens * inner * 2 * sizes.width, _MLP, module),
        SavedTensor("activated gate, up, and their product", tokens * inner * 3 * sizes.width, _MLP, module),
        *custom_activation(config, tokens * inner, sizes, module),
    ]


def custom_activation(
    config: McaModelConfig, elements: float, sizes: Sizes, module: str
) -> list[SavedTensor]:
    """Return the saved tensors of an MLP activation that torch does not provide."""
    if config.mlp.mlp_multipliers is not None:
        scaled = "mca_models/megatron/features/mlp.py: scaled_activation"
        return [SavedTensor("gate times its factor", elements * sizes.width, scaled, module)]
    if config.mlp.hidden_act != "xielu":
        return []
    source = "mca_models/megatron/features/mlp.py: forward"
    return [SavedTensor("both branches of xIELU", elements * (3 * sizes.width + 1), source, module)]


def experts(
    config: McaModelConfig, moe: ExpertSizes, sizes: Sizes, *, worst: bool = False
) -> list[SavedTensor]:
    """Return the saved tensors of a layer's experts, run sequentially."""
    sent = sizes.dispatched(worst=worst)
    inner = moe.inner / sizes.layout.etp
    lines = [SavedTensor("router", sizes.split * moe.choices * 10.0, _ROUTER, "moe")]
    if config.mlp.activation_func_clamp_value is not None:
        lines.append(SavedTensor("clamped, with an offset", 2 * sent * inner * sizes.width, _MLP, "moe"))
    lines.append(SavedTensor("tokens sent to experts", sent * moe.hidden * sizes.width, _DISPATCH, "moe"))
    lines += gated(config, inner, sent, sizes, "moe")
    lines.append(SavedTensor("product times probability", sent * inner * sizes.width, _MLP, "moe"))
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
            weights = sizes.tokens * num_heads(config) / sizes.layout.tp * CHUNK * SINGLE
            return 2 * between + gathered, 3 * weights + between + gathered / 2
        inner = sizes.tokens * config.mlp.ffn_hidden_size / sizes.layout.tp * width
        return 2 * between + gathered, 2 * inner + between + gathered / 2
    moved = sizes.dispatched() * sizes.moe.hidden * width * (4 if sizes.layout.etp == 1 else 8)
    return moved + 3 * between, moved * 3 / 4 + 2 * between
