"""Shapes of every parameter and HF tensor, from the model's sizes alone.

Families share Megatron's names, and a name with the sizes fixes the full parameter's shape. The shapes of HF tensors
follow through the layouts of a family's rules.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache

from mca_config.errors import McaError
from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import FamilyConfig
from mca_models.weights import Layout, Param, Stage

Shape = tuple[int, ...]


def full_shape(param: Param, config: McaModelConfig) -> Shape:
    """Shape of the unsharded Megatron parameter, without vocabulary padding."""
    if param.shape is not None:
        return param.shape
    if param.stage is Stage.LAYER and param.layer is not None:
        config = config.layer_config(param.layer)
    inside = param.mca.rpartition("{layer}.")[2].removeprefix("transformer_layer.")
    try:
        return _TABLES[config.mla is not None][inside](config)
    except (TypeError, LookupError, AttributeError):
        raise McaError(f"{param.mca_name()}: the model's configuration lacks a size that it needs") from None


def hf_shapes(params: Iterable[Param], config: McaModelConfig) -> dict[str, Shape]:
    """Shape of every HF tensor that ``params`` are made of, by name."""
    shapes: dict[str, Shape] = {}
    for param in params:
        parts = _parts(param.layout, param.hf_layout, full_shape(param, config))
        front = (config.num_experts,) if param.stacked else ()
        shapes |= {name: front + part for name, part in zip(param.hf_names(), parts, strict=True)}
    return shapes


@cache
def _parts(layout: Layout, hf_layout: Layout, whole: Shape) -> tuple[Shape, ...]:
    """The shapes of what ``Param.from_full`` gives, from an array that holds one byte."""
    import numpy as np

    empty = np.broadcast_to(np.zeros((), np.uint8), whole)
    return tuple(tuple(part.shape) for part in hf_layout.pack(layout.unpack((empty,))))


def _vocabulary(c: McaModelConfig) -> Shape:
    return c.vocab_size, c.hidden_size


def _hidden(c: McaModelConfig) -> Shape:
    return (c.hidden_size,)


def _per_layer(c: McaModelConfig) -> int:
    """Channels of the embeddings that all layers take."""
    return c.num_layers * given(c.per_layer_embedding).per_layer_input_size


def _fc1(width: Callable[[FamilyConfig], int]) -> Callable[[FamilyConfig], Shape]:
    return lambda c: (width(c) * (1 + c.mlp.gated_linear_unit), c.hidden_size)


def _fc2(width: Callable[[FamilyConfig], int]) -> Callable[[FamilyConfig], Shape]:
    return lambda c: (c.hidden_size, width(c))


def _first(shape: Callable[[FamilyConfig], Shape]) -> Callable[[FamilyConfig], Shape]:
    """The shape of a bias."""
    return lambda c: shape(c)[:1]


def _qkv(c: McaModelConfig) -> Shape:
    queries = (
        c.attention.num_attention_heads * (1 + c.attention.attention_output_gate) * c.attention.kv_channels
    )
    values = 0 if c.attention.values_are_keys else c.attention.value_width
    if c.accepts_keys:
        return queries, c.hidden_size
    gates = c.attention.num_attention_heads * c.attention.head_gate
    return queries + c.attention.num_query_groups * (c.attention.kv_channels + values) + gates, c.hidden_size


def _head_norm(heads: Callable[[FamilyConfig], int]) -> Callable[[FamilyConfig], Shape]:
    return lambda c: (
        c.attention.kv_channels
        * (heads(c) if c.attention.qk_layernorm_full_width or c.attention.qk_layernorm_per_head else 1),
    )


def _delta_widths(c: FamilyConfig) -> tuple[int, int, int]:
    """Rows of q or k, rows of v, value heads of a gated delta net."""
    values = c.linear_attention.linear_num_value_heads
    return (
        c.linear_attention.linear_num_key_heads * c.linear_attention.linear_key_head_dim,
        values * c.linear_attention.linear_value_head_dim,
        values,
    )


def _mamba_widths(c: FamilyConfig) -> tuple[int, int]:
    """Channels inside a state space layer, rows of what goes into its states (as many read them)."""
    return (
        c.mamba.mamba_num_heads * c.mamba.mamba_head_dim,
        c.mamba.mamba_num_groups * c.mamba.mamba_state_dim,
    )


def _lightning_width(c: FamilyConfig) -> int:
    """Return the channels of all heads of lightning attention."""
    width: int = c.lightning_attention.lightning_num_heads * c.lightning_attention.lightning_head_dim
    return width


def _in_proj(c: McaModelConfig) -> Shape:
    if c.selective_scan is not None:
        return 2 * c.selective_scan.scan_channels, c.hidden_size
    if c.short_convolution is not None:
        return 3 * c.hidden_size, c.hidden_size
    if c.lightning_attention is not None:
        return 4 * _lightning_width(c), c.hidden_size
    if c.mamba is not None:
        inside, states = _mamba_widths(c)
        return 2 * (inside + states) + c.mamba.mamba_num_heads, c.hidden_size
    key, value, heads = _delta_widths(c)
    return 2 * key + 2 * value + 2 * heads, c.hidden_size


def _conv(c: FamilyConfig) -> Shape:
    if c.selective_scan is not None:
        return c.selective_scan.scan_channels, 1, c.selective_scan.scan_conv_kernel_dim
    if c.short_convolution is not None:
        return c.hidden_size, 1, c.short_convolution.short_conv_kernel_dim
    if c.mamba is not None:
        inside, states = _mamba_widths(c)
        return inside + 2 * states, 1, c.mamba.mamba_conv_kernel_dim
    key, value, _ = _delta_widths(c)
    return 2 * key + value, 1, c.linear_attention.linear_conv_kernel_dim


def _out_proj_columns(c: McaModelConfig) -> int:
    if c.selective_scan is not None:
        return c.selective_scan.scan_channels
    if c.short_convolution is not None:
        return c.hidden_size
    if c.lightning_attention is not None:
        return _lightning_width(c)
    return _mamba_widths(c)[0] if c.mamba is not None else _delta_widths(c)[1]


def _states(c: FamilyConfig) -> Shape:
    """Return the shape of one number for each head, or channel, with a state."""
    if c.selective_scan is not None:
        return (c.selective_scan.scan_channels,)
    return (c.linear_attention.linear_num_value_heads if c.mamba is None else c.mamba.mamba_num_heads,)


def _rates(c: FamilyConfig) -> Shape:
    """Return the shape of the decay rates of states."""
    scan = c.selective_scan
    return _states(c) if scan is None else (scan.scan_channels, scan.scan_state_dim)


def _scan_rows(c: FamilyConfig) -> int:
    """Return the rows of time steps, B and C of a Mamba 1 layer."""
    rows: int = c.selective_scan.scan_step_rank + 2 * c.selective_scan.scan_state_dim
    return rows


_FC1 = _fc1(lambda c: c.mlp.ffn_hidden_size)
_MLP = {
    "mlp.linear_fc1.layer_norm_weight": _hidden,
    "mlp.linear_fc1.layer_norm_bias": _hidden,
    "mlp.linear_fc1.weight": _FC1,
    "mlp.linear_fc1.bias": _first(_FC1),
    "mlp.linear_fc2.weight": _fc2(lambda c: c.mlp.ffn_hidden_size),
    "mlp.linear_fc2.bias": _hidden,
    "mlp.post_layernorm.weight": _hidden,
    "layer_scalar": lambda c: (1,),
    "per_layer_gate.weight": lambda c: (c.per_layer_embedding.per_layer_input_size, c.hidden_size),
    "per_layer_projection.weight": lambda c: (c.hidden_size, c.per_layer_embedding.per_layer_input_size),
    "per_layer_layernorm.weight": _hidden,
    "mlp.activation_func.alpha_p": lambda c: (1,),
    "mlp.activation_func.alpha_n": lambda c: (1,),
    "mlp.activation_func.beta": lambda c: (1,),
    "mlp.activation_func.eps": lambda c: (1,),
}


def _routed(c: McaModelConfig) -> int:
    """Channels that an expert gets."""
    return given(c.moe).moe_latent_size or c.hidden_size


def _expert_1(c: FamilyConfig) -> Shape:
    return c.moe.moe_ffn_hidden_size * (1 + c.mlp.gated_linear_unit), _routed(c)


def _expert_2(c: FamilyConfig) -> Shape:
    return _routed(c), c.moe.moe_ffn_hidden_size


_EXPERTS = {
    "pre_mlp_layernorm.weight": _hidden,
    "pre_mlp_layernorm.bias": _hidden,
    "mlp.router.weight": lambda c: (c.moe.num_router_choices, c.hidden_size),
    "mlp.router.bias": lambda c: (c.moe.num_router_choices,),
    "mlp.router.expert_bias": lambda c: (c.moe.num_router_choices,),
    "mlp.experts.linear_fc1.weight{expert}": _expert_1,
    "mlp.experts.linear_fc1.bias{expert}": _first(_expert_1),
    "mlp.experts.linear_fc2.weight{expert}": _expert_2,
    "mlp.experts.linear_fc2.bias{expert}": _first(_expert_2),
    "mlp.fc1_latent_proj.weight": lambda c: (c.moe.moe_latent_size, c.hidden_size),
    "mlp.fc2_latent_proj.weight": lambda c: (c.hidden_size, c.moe.moe_latent_size),
    "mlp.shared_experts.linear_fc1.weight": _fc1(lambda c: c.moe.moe_shared_expert_intermediate_size),
    "mlp.shared_experts.linear_fc2.weight": _fc2(lambda c: c.moe.moe_shared_expert_intermediate_size),
    "mlp.shared_experts.gate_weight": lambda c: (1, c.hidden_size),
    "mlp.dense_layernorm.weight": _hidden,
    "mlp.dense_post_layernorm.weight": _hidden,
    "mlp.experts_layernorm.weight": _hidden,
    "mlp.experts_post_layernorm.weight": _hidden,
    "mlp.router_scale": _hidden,
    "mlp.expert_scale": lambda c: (c.moe.num_moe_experts,),
}
_ENDS = {
    "embedding.word_embeddings.weight": _vocabulary,
    "embedding.layernorm.weight": _hidden,
    "embedding.layernorm.bias": _hidden,
    "embedding.position_embeddings.weight": lambda c: (
        c.max_position_embeddings + c.embedding.position_offset,
        c.hidden_size,
    ),
    "embedding.per_layer_embeddings.weight": lambda c: (c.vocab_size, _per_layer(c)),
    "embedding.per_layer_projection.weight": lambda c: (_per_layer(c), c.hidden_size),
    "embedding.per_layer_layernorm.weight": lambda c: (c.per_layer_embedding.per_layer_input_size,),
    "decoder.final_layernorm.weight": _hidden,
    "decoder.final_layernorm.bias": _hidden,
    "output_layer.weight": lambda c: (c.head.num_labels or c.vocab_size, c.hidden_size),
    "output_layer.bias": lambda c: (c.head.num_labels or c.vocab_size,),
    "enorm.weight": _hidden,
    "hnorm.weight": _hidden,
    "eh_proj.weight": lambda c: (c.hidden_size, 2 * c.hidden_size),
    "final_layernorm.weight": _hidden,
}
_ATTENTION = {
    "input_layernorm.weight": _hidden,
    "input_layernorm.bias": _hidden,
    "self_attention.linear_qkv.layer_norm_weight": _hidden,
    "self_attention.linear_qkv.layer_norm_bias": _hidden,
    "self_attention.linear_qkv.weight": _qkv,
    "self_attention.linear_qkv.bias": _first(_qkv),
    "self_attention.q_layernorm.weight": _head_norm(lambda c: c.attention.num_attention_heads),
    "self_attention.k_layernorm.weight": _head_norm(lambda c: c.attention.num_query_groups),
    "self_attention.q_layernorm.bias": lambda c: (c.attention.kv_channels,),
    "self_attention.k_layernorm.bias": lambda c: (c.attention.kv_channels,),
    "self_attention.core_attention.softmax_offset": lambda c: (c.attention.num_attention_heads,),
    "self_attention.linear_proj.weight": lambda c: (
        c.hidden_size,
        c.attention.num_attention_heads * c.attention.value_width,
    ),
    "self_attention.linear_proj.bias": _hidden,
    "self_attention.post_layernorm.weight": _hidden,
}
_DELTA_NET = {
    "self_attention.in_proj.layer_norm_weight": _hidden,
    "self_attention.in_proj.weight": _in_proj,
    "self_attention.conv1d.weight": _conv,
    "self_attention.conv1d.bias": _first(_conv),
    "self_attention.dt_bias": _states,
    "self_attention.A_log": _rates,
    "self_attention.D": _states,
    "self_attention.norm.weight": lambda c: _mamba_widths(c)[:1],
    "self_attention.out_norm.weight": lambda c: (c.linear_attention.linear_value_head_dim,),
    "self_attention.x_proj.weight": lambda c: (_scan_rows(c), c.selective_scan.scan_channels),
    "self_attention.dt_proj.weight": lambda c: (
        c.selective_scan.scan_channels,
        c.selective_scan.scan_step_rank,
    ),
    "self_attention.dt_proj.bias": _states,
    "self_attention.dt_layernorm.weight": lambda c: (c.selective_scan.scan_step_rank,),
    "self_attention.b_layernorm.weight": lambda c: (c.selective_scan.scan_state_dim,),
    "self_attention.c_layernorm.weight": lambda c: (c.selective_scan.scan_state_dim,),
    "self_attention.gate_norm.weight": lambda c: (_lightning_width(c),),
    "self_attention.out_proj.weight": lambda c: (c.hidden_size, _out_proj_columns(c)),
}
_PREFIX = "self_attention."
_PARALLEL_MAMBA = {
    name.replace(_PREFIX, f"{_PREFIX}mamba."): shape
    for name, shape in _DELTA_NET.items()
    if "layer_norm" not in name
}
_KIMI_DELTA = {
    "self_attention.in_proj.weight": lambda c: (
        (3 if c.linear_attention.linear_low_rank_gates else 5) * _delta_widths(c)[0] + _delta_widths(c)[2],
        c.hidden_size,
    ),
    "self_attention.gates_down.weight": lambda c: (2 * c.linear_attention.linear_key_head_dim, c.hidden_size),
    "self_attention.fade_up.weight": lambda c: (_delta_widths(c)[0], c.linear_attention.linear_key_head_dim),
    "self_attention.gate_up.weight": lambda c: (_delta_widths(c)[0], c.linear_attention.linear_key_head_dim),
    "self_attention.conv1d.weight": _conv,
    "self_attention.dt_bias": lambda c: (_delta_widths(c)[0],),
    "self_attention.A_log": lambda c: (c.linear_attention.linear_num_key_heads,),
    "self_attention.out_norm.weight": lambda c: (c.linear_attention.linear_key_head_dim,),
    "self_attention.out_proj.weight": lambda c: (c.hidden_size, _delta_widths(c)[0]),
}
_LATENT = {
    "input_layernorm.weight": _hidden,
    "self_attention.linear_q_proj.weight": lambda c: (
        c.attention.num_attention_heads * c.attention.kv_channels,
        c.hidden_size,
    ),
    "self_attention.linear_q_down_proj.weight": lambda c: (c.mla.q_lora_rank, c.hidden_size),
    "self_attention.linear_q_up_proj.layer_norm_weight": lambda c: (c.mla.q_lora_rank,),
    "self_attention.linear_q_up_proj.weight": lambda c: (
        c.attention.num_attention_heads * c.attention.kv_channels,
        c.mla.q_lora_rank,
    ),
    "self_attention.linear_kv_down_proj.weight": lambda c: (
        c.mla.kv_lora_rank + c.mla.qk_pos_emb_head_dim,
        c.hidden_size,
    ),
    "self_attention.linear_kv_up_proj.layer_norm_weight": lambda c: (c.mla.kv_lora_rank,),
    "self_attention.linear_kv_up_proj.weight": lambda c: (
        c.attention.num_attention_heads * (c.mla.qk_head_dim + c.mla.v_head_dim),
        c.mla.kv_lora_rank,
    ),
    "self_attention.linear_proj.weight": lambda c: (
        c.hidden_size,
        c.attention.num_attention_heads * c.mla.v_head_dim,
    ),
    "self_attention.linear_head_gate.weight": lambda c: (c.attention.num_attention_heads, c.hidden_size),
}
_INDEXER = {
    f"self_attention.core_attention.indexer.{name}": shape
    for name, shape in {
        "wq_b": lambda c: (c.dsa.index_num_heads * c.dsa.index_head_dim, c.mla.q_lora_rank),
        "wk": lambda c: (c.dsa.index_head_dim, c.hidden_size),
        "k_norm_weight": lambda c: (c.dsa.index_head_dim,),
        "k_norm_bias": lambda c: (c.dsa.index_head_dim,),
        "weights_proj": lambda c: (c.dsa.index_num_heads, c.hidden_size),
    }.items()
}
_BLOCK_INDEXER = {
    f"self_attention.core_attention.indexer.{name}.weight": shape
    for name, shape in {
        "q_proj": lambda c: (
            c.attention.num_query_groups * c.block_sparse_attention.index_blocks["channels"],
            c.hidden_size,
        ),
        "k_proj": lambda c: (c.block_sparse_attention.index_blocks["channels"], c.hidden_size),
        "q_norm": lambda c: (c.block_sparse_attention.index_blocks["channels"],),
        "k_norm": lambda c: (c.block_sparse_attention.index_blocks["channels"],),
    }.items()
}

_Table = Mapping[str, Callable[[FamilyConfig], Shape]]
_TABLES: Mapping[bool, _Table] = {
    False: {
        **{**_ENDS, **_MLP, **_EXPERTS, **_ATTENTION},
        **{**_DELTA_NET, **_PARALLEL_MAMBA, **_BLOCK_INDEXER},
    },
    True: {**_ENDS, **_MLP, **_EXPERTS, **_LATENT, **_KIMI_DELTA, **_INDEXER},
}
