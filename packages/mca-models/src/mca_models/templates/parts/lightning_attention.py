"""Rules and costs of lightning attention (MiniMax-Text-01).

`mca_models.megatron.features.lightning_attention` computes these layers.
"""

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_models.templates.parts.common import ATTN, inner
from mca_models.templates.parts.gated_delta_net import fused
from mca_models.templates.parts.layer_costs import CHUNK, SINGLE, LayerSizes, MixerCosts, SavedTensor, norm
from mca_models.templates.parts.names import HF_ATTN
from mca_models.weights import COLUMN, ROW, Concat, Param

_PARTS = (3, 1)
"""Shares of the input projection: queries, keys and values of each head, and gates."""


def lightning_attention(config: McaModelConfig) -> list[Param]:
    """Lightning attention of a layer, with the norm before it."""
    names = (f"{HF_ATTN}qkv_proj.weight", f"{HF_ATTN}output_gate.weight")
    return [
        inner("input_layernorm.weight", "input_layernorm.weight"),
        Param(mca=f"{ATTN}in_proj.weight", hf=names, layout=Concat(_PARTS), shard=fused(_PARTS)),
        inner("self_attention.gate_norm.weight", "self_attn.norm.weight", shard=COLUMN),
        inner("self_attention.out_proj.weight", "self_attn.out_proj.weight", shard=ROW),
    ]


def _width(config: McaModelConfig, sizes: LayerSizes) -> float:
    own = given(config.lightning_attention)
    return own.lightning_num_heads * own.lightning_head_dim / sizes.layout.tp


def _saved_tensors(config: McaModelConfig, sizes: LayerSizes) -> list[SavedTensor]:
    """Return the saved tensors of lightning attention, which computes in fp32."""
    tokens, width = sizes.tokens, _width(config, sizes)
    own = given(config.lightning_attention)
    heads, channels = own.lightning_num_heads / sizes.layout.tp, own.lightning_head_dim
    source = "mca_models/megatron/features/lightning_attention.py: lightning_attention"
    return [
        SavedTensor("projected queries, keys and values", tokens * 3 * width * sizes.width, source),
        SavedTensor("queries, keys and values of chunks", tokens * 3 * width * SINGLE, source),
        SavedTensor("decayed queries and keys", tokens * 2 * width * SINGLE, source),
        SavedTensor("token-by-token matrices of a chunk", tokens * heads * CHUNK * SINGLE, source),
        SavedTensor("states", tokens / CHUNK * heads * channels**2 * SINGLE, source),
        SavedTensor(
            "gate, activated, and normalized and gated outputs", tokens * 3 * width * sizes.width, source
        ),
        *norm(tokens, width, sizes, output=False),
    ]


def _weights(config: McaModelConfig, sizes: LayerSizes) -> float:
    return 5 * config.hidden_size * _width(config, sizes)


def _flops(config: McaModelConfig, sizes: LayerSizes) -> float:
    channels = given(config.lightning_attention).lightning_head_dim
    return 2 * sizes.tokens * _width(config, sizes) * 2 * (CHUNK + channels)


LIGHTNING_COSTS = MixerCosts(_saved_tensors, _weights, _flops)
