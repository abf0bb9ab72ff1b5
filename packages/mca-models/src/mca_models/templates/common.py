"""Rules that many families share, under the names that HF gives them."""

from typing import Any

from mca_config.model_config import McaModelConfig
from mca_models.templates.names import HF, HF_ATTN, HF_EMBEDDING, HF_HEAD, HF_MLP
from mca_models.weights import COLUMN, GATED, ROW, Concat, GroupedHeads, Param, Stage

MCA = "decoder.layers.{layer}."
ATTN, MLP = MCA + "self_attention.", MCA + "mlp."

EMBEDDING = "embedding.word_embeddings.weight"


def inner(name: str, hf: str, **rule: Any) -> Param:
    """A parameter of a decoder layer, both names without their layer prefix."""
    return Param(mca=MCA + name, hf=(HF + hf,), **rule)


def qkv(config: McaModelConfig) -> list[Param]:
    """Fused ``linear_qkv`` from q, k, v projections, with biases if the family has them."""
    groups = GroupedHeads(
        heads=(config.num_attention_heads // config.num_query_groups, 1, 1), head_dim=config.kv_channels
    )
    kinds = ("weight", "bias") if config.add_qkv_bias else ("weight",)
    return [
        Param(
            mca=f"{ATTN}linear_qkv.{kind}",
            hf=tuple(f"{HF_ATTN}{x}_proj.{kind}" for x in "qkv"),
            layout=groups,
            shard=COLUMN,
        )
        for kind in kinds
    ]


def attention(config: McaModelConfig) -> list[Param]:
    """Pre-norm grouped-query attention of a decoder layer."""
    norms = [
        inner("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
        inner("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    ]
    return [
        inner("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        *qkv(config),
        *(norms if config.qk_layernorm else []),
        inner("self_attention.linear_proj.weight", "self_attn.o_proj.weight", shard=ROW),
    ]


def gate_up(mca: str, hf: str) -> Param:
    """A gated ``linear_fc1`` from ``gate_proj`` and ``up_proj``."""
    names = (f"{hf}gate_proj.weight", f"{hf}up_proj.weight")
    return Param(mca=f"{mca}linear_fc1.weight", hf=names, layout=Concat((1, 1)), shard=GATED)


def down(mca: str, hf: str) -> Param:
    """``linear_fc2`` from ``down_proj``."""
    return Param(mca=f"{mca}linear_fc2.weight", hf=(f"{hf}down_proj.weight",), shard=ROW)


def dense_mlp() -> list[Param]:
    """Pre-norm gated MLP of a decoder layer."""
    return [
        inner("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
        gate_up(MLP, HF_MLP),
        down(MLP, HF_MLP),
    ]


def embedding() -> Param:
    """The word embedding."""
    return Param(mca=EMBEDDING, hf=(HF_EMBEDDING,), shard=COLUMN, stage=Stage.FIRST, vocab=True)


def head(config: McaModelConfig) -> list[Param]:
    """Final norm and output layer; a tied output layer is an alias of the embedding."""
    tied = config.tie_word_embeddings
    return [
        Param(mca="decoder.final_layernorm.weight", hf=("model.norm.weight",), stage=Stage.LAST),
        Param(
            mca="output_layer.weight",
            hf=(HF_EMBEDDING if tied else HF_HEAD,),
            shard=COLUMN,
            stage=Stage.LAST,
            vocab=True,
            alias_of=EMBEDDING if tied else None,
        ),
    ]
