"""Rules of Kimi Delta Attention, under the names of Kimi Linear and of transformers' modules.

`mca_models.megatron.features.kimi_delta_attention` computes these layers.
"""

from collections.abc import Iterator

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Typed, Values
from mca_models.templates.config_table import HfConfig
from mca_models.templates.parts.common import ATTN, inner
from mca_models.templates.parts.gated_delta_net import fused, write_layers
from mca_models.templates.parts.mla import latent_attention
from mca_models.templates.parts.names import HF_ATTN
from mca_models.weights import COLUMN, ROW, SEPARATE, Concat, Layout, Param, Shaped, expand_rules


def delta_sizes(heads: Typed, width: Typed, kernel: Typed) -> JsonObject:
    """Return the fields of the sizes: queries, keys and values have as many heads of the same width."""
    return {
        "linear_conv_kernel_dim": kernel,
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), heads),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), width),
    }


def write_delta_sizes(values: Values) -> HfConfig:
    """Write the HF keys of the sizes and of the types of layers."""
    return {
        "linear_num_heads": values["linear_num_key_heads"],
        "linear_head_dim": values["linear_key_head_dim"],
        "linear_conv_kernel_dim": values["linear_conv_kernel_dim"],
        **write_layers(values),
    }


def kimi_delta_attention(config: McaModelConfig, *, loaded: bool) -> list[Param]:
    """Linear attention with the norm before it.

    Args:
        config: The model.
        loaded: Names are those of transformers' modules, which have a separate one for the decay.
    """
    linear = given(config.linear_attention)
    heads = linear.linear_num_key_heads
    rows = heads * linear.linear_key_head_dim
    gate = f"{HF_ATTN}forget_gate." if loaded else HF_ATTN
    projections, sizes = [f"{HF_ATTN}{part}_proj.weight" for part in "qkvb"], [rows, rows, rows, heads]
    a_log: Layout = Shaped((1, 1, -1, 1))
    if linear.linear_low_rank_gates:
        down = (f"{gate}f_a_proj.weight", f"{HF_ATTN}g_a_proj.weight")
        gates = [
            Param(mca=f"{ATTN}gates_down.weight", hf=down, layout=Concat((1, 1))),
            Param(mca=f"{ATTN}fade_up.weight", hf=(f"{gate}f_b_proj.weight",), shard=COLUMN),
            inner("self_attention.gate_up.weight", "self_attn.g_b_proj.weight", shard=COLUMN),
        ]
    else:
        projections += [f"{gate}f_proj.weight", f"{HF_ATTN}g_proj.weight"]
        sizes, gates, a_log = [*sizes, rows, rows], [], SEPARATE
    convolution = tuple(f"{HF_ATTN}{part}_conv1d.weight" for part in "qkv")
    return [
        inner("input_layernorm.weight", "input_layernorm.weight"),
        Param(
            mca=f"{ATTN}in_proj.weight",
            hf=tuple(projections),
            layout=Concat(tuple(sizes)),
            shard=fused(sizes),
        ),
        *gates,
        Param(
            mca=f"{ATTN}conv1d.weight",
            hf=(f"{HF_ATTN}conv1d.weight",) if loaded else convolution,
            layout=SEPARATE if loaded else Concat((1, 1, 1)),
            shard=fused((1, 1, 1)),
        ),
        Param(mca=f"{ATTN}dt_bias", hf=(f"{gate}dt_bias",), shard=COLUMN),
        Param(mca=f"{ATTN}A_log", hf=(f"{gate}A_log",), hf_layout=a_log, shard=COLUMN),
        inner("self_attention.out_norm.weight", "self_attn.o_norm.weight"),
        inner("self_attention.out_proj.weight", "self_attn.o_proj.weight", shard=ROW),
    ]


def delta_and_latent_attention(config: McaModelConfig, *, loaded: bool) -> Iterator[Param]:
    """Kimi Delta Attention or MLA of every decoder layer; `kimi_delta_attention` has the arguments."""
    kinds = {True: kimi_delta_attention(config, loaded=loaded), False: latent_attention(config)}
    for layer in range(config.num_layers):
        yield from expand_rules(kinds[config.is_linear_layer(layer)], layers=[layer])
