"""Rules that many families share, under the names that HF gives them.

What a single family does otherwise is in that family's own file.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from mca_config.model_config import McaModelConfig
from mca_config.types import Typed
from mca_models.templates.classification_head import SCORE
from mca_models.templates.parts.names import HF, HF_ATTN, HF_EMBEDDING, HF_HEAD, HF_HEAD_BIAS, HF_MLP
from mca_models.weights import (
    COLUMN,
    GATED,
    REPLICATED,
    ROW,
    SEPARATE,
    Concat,
    GroupedHeads,
    Layout,
    Param,
    PerTensor,
    Shaped,
    Stage,
    expand_rules,
)

MCA = "decoder.layers.{layer}."
ATTN, MLP = MCA + "self_attention.", MCA + "mlp."

EMBEDDING = "embedding.word_embeddings.weight"


def inner(name: str, hf: str, **rule: Typed) -> Param:
    """A parameter of a decoder layer, both names without their layer prefix."""
    return Param(mca=MCA + name, hf=(HF + hf,), **rule)


def qkv(config: McaModelConfig) -> list[Param]:
    """Fused ``linear_qkv`` from q, k, v projections, with biases if the family has them.

    With an output gate HF's ``q_proj`` holds each head's query and gate side by side, Megatron's group all
    its queries, then all its gates: ``[q..q gate..gate k v]``. Gates of heads come last: ``[q..q k v gate]``.
    """
    heads, width = (
        config.attention.num_attention_heads // config.attention.num_query_groups,
        config.attention.kv_channels,
    )
    parts = "q" if config.accepts_keys else "qk" if config.attention.values_are_keys else "qkv"
    # rows of different heads count one by one
    rows = (heads * width, width, config.attention.value_width)[: len(parts)]
    names = [f"{x}_proj" for x in parts]
    if config.attention.head_gate:
        rows, names = (*rows, heads), [*names, "gate_proj"]
    layout: Layout = GroupedHeads(rows, 1) if config.has_custom_qkv else GroupedHeads((heads, 1, 1), width)
    hf_layout: Layout = SEPARATE
    if config.attention.attention_output_gate:
        layout = GroupedHeads((heads, heads, 1, 1), width)
        hf_layout = PerTensor(((GroupedHeads((1, 1), width), 2), (SEPARATE, 1), (SEPARATE, 1)))
    kinds = ("weight", "bias") if config.attention.add_qkv_bias or config.attention_biases else ("weight",)
    return [
        Param(
            mca=f"{ATTN}linear_qkv.{kind}",
            hf=tuple(f"{HF_ATTN}{name}.{kind}" for name in names),
            layout=layout,
            hf_layout=hf_layout,
            shard=COLUMN,
        )
        for kind in kinds
    ]


def gated_qkv(config: McaModelConfig) -> list[Param]:
    """Return ``linear_qkv`` where HF has the output gate in a separate tensor, ``gate_proj``."""
    heads = config.attention.num_attention_heads // config.attention.num_query_groups
    names = tuple(f"{HF_ATTN}{part}_proj.weight" for part in ("q", "gate", "k", "v"))
    layout = GroupedHeads((heads, heads, 1, 1), config.attention.kv_channels)
    return [Param(mca=f"{ATTN}linear_qkv.weight", hf=names, layout=layout, shard=COLUMN)]


def fused_qkv(config: McaModelConfig) -> list[Param]:
    """``linear_qkv`` where HF too has one tensor, with all of q before k before v."""
    heads, groups, width = (
        config.attention.num_attention_heads,
        config.attention.num_query_groups,
        config.attention.kv_channels,
    )
    in_groups = GroupedHeads((heads // groups, 1, 1), width)
    rules = grouped_qkv(config, "qkv_proj")
    return [replace(rule, layout=in_groups, hf_layout=Concat((heads, groups, groups))) for rule in rules]


def attention(config: McaModelConfig, projections: Sequence[Param] | None = None) -> list[Param]:
    """Grouped-query attention of a decoder layer with its norms.

    Args:
        config: The model.
        projections: Rules of ``linear_qkv``; None: from ``qkv``.
    """
    own = "input_layernorm." if config.has_custom_norms else "self_attention.linear_qkv.layer_norm_"
    before = [inner(f"{own}weight", "input_layernorm.weight")]
    after = [inner("self_attention.post_layernorm.weight", "post_attention_layernorm.weight")]
    bias = [inner("self_attention.linear_proj.bias", "self_attn.o_proj.bias")]
    sink = [inner("self_attention.core_attention.softmax_offset", "self_attn.sinks", shard=COLUMN)]
    return [
        *with_norm_biases(config, before if config.norm.norm_placement != "post" else []),
        *(qkv(config) if projections is None else projections),
        *qk_norms(config),
        *(sink if config.attention.softmax_type == "learnable" else []),
        inner("self_attention.linear_proj.weight", "self_attn.o_proj.weight", shard=ROW),
        *(bias if config.attention_biases else []),
        *(after if config.norm.norm_placement != "pre" else []),
    ]


def qk_norms(config: McaModelConfig) -> list[Param]:
    """The norms of q and of k, whose weights are cut like the heads if each head has its own."""
    if not config.attention.qk_layernorm or not config.attention.qk_layernorm_weight:
        return []
    own = config.attention.qk_layernorm_full_width or config.attention.qk_layernorm_per_head
    layout = (
        Shaped((-1, config.attention.kv_channels)) if config.attention.qk_layernorm_per_head else SEPARATE
    )
    parts = "q" if config.accepts_keys else "qk"
    names = ((f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight") for x in parts)
    norms = [inner(mca, hf, shard=COLUMN if own else REPLICATED, hf_layout=layout) for mca, hf in names]
    return norms if own else with_norm_biases(config, norms)


def gate_up(mca: str, hf: str) -> Param:
    """A gated ``linear_fc1`` from ``gate_proj`` and ``up_proj``."""
    names = (f"{hf}gate_proj.weight", f"{hf}up_proj.weight")
    return Param(mca=f"{mca}linear_fc1.weight", hf=names, layout=Concat((1, 1)), shard=GATED)


def up(mca: str, hf: str) -> Param:
    """``linear_fc1`` of an MLP without a gate, from ``up_proj``."""
    return Param(mca=f"{mca}linear_fc1.weight", hf=(f"{hf}up_proj.weight",), shard=COLUMN)


def down(mca: str, hf: str) -> Param:
    """``linear_fc2`` from ``down_proj``."""
    return Param(mca=f"{mca}linear_fc2.weight", hf=(f"{hf}down_proj.weight",), shard=ROW)


def dense_mlp(config: McaModelConfig, projections: Sequence[Param] | None = None) -> list[Param]:
    """Gated MLP of a decoder layer with its norms.

    HF calls the norm before the MLP ``post_attention_layernorm``, unless there are post-norms.

    Args:
        config: The model.
        projections: Rules of ``linear_fc1`` and ``linear_fc2``; None: from separate gate and up.
    """
    own = "pre_mlp_layernorm." if config.has_custom_norms else "mlp.linear_fc1.layer_norm_"
    before, after = norms_around_mlp(config, f"{own}weight")
    return [*before, *(mlp_linears(config) if projections is None else projections), *after]


def norms_around_mlp(config: McaModelConfig, before: str) -> tuple[list[Param], list[Param]]:
    """The norm before an MLP, which Megatron calls ``before``, and that after it, as far as the family has them."""
    pre = config.norm.norm_placement == "pre"
    own = "post_attention_layernorm" if pre else "pre_feedforward_layernorm"
    after = inner("mlp.post_layernorm.weight", "post_feedforward_layernorm.weight")
    none = config.norm.norm_placement == "post" or config.block.parallel_block == "one_norm"
    first = [] if none else [inner(before, f"{own}.weight")]
    return with_norm_biases(config, first), with_norm_biases(config, [] if pre else [after])


def mlp_linears(config: McaModelConfig) -> list[Param]:
    """``linear_fc1`` from gate and up, or from up alone, and ``linear_fc2``, with biases if the family has them."""
    parts, shard = (("gate", "up"), GATED) if config.mlp.gated_linear_unit else (("up",), COLUMN)
    rules = []
    for kind, of_fc2 in (("weight", ROW), ("bias", REPLICATED)):
        names = tuple(f"{HF_MLP}{part}_proj.{kind}" for part in parts)
        fc1 = Param(mca=f"{MLP}linear_fc1.{kind}", hf=names, layout=Concat((1,) * len(parts)), shard=shard)
        rules += [fc1, inner(f"mlp.linear_fc2.{kind}", f"mlp.down_proj.{kind}", shard=of_fc2)]
    return rules if config.mlp.add_bias_linear else rules[:2]


def with_norm_biases(config: McaModelConfig, rules: Iterable[Param]) -> list[Param]:
    """``rules`` of norms as far as these have weights, with the bias after each weight if they have some."""
    if not config.norm.norm_weight:
        return []
    kinds = (
        ("weight", "bias")
        if config.norm.normalization == "LayerNorm" and config.norm.norm_bias
        else ("weight",)
    )

    def of(rule: Param, kind: str) -> Param:
        hf = tuple(name.removesuffix("weight") + kind for name in rule.hf)
        return replace(rule, mca=rule.mca.removesuffix("weight") + kind, hf=hf)

    return [of(rule, kind) for rule in rules for kind in kinds]


def grouped_qkv(config: McaModelConfig, name: str) -> list[Param]:
    """Return ``linear_qkv`` where HF too has one tensor, ``name``, in Megatron's order."""
    kinds = ("weight", "bias") if config.attention_biases else ("weight",)
    rules = [(f"self_attention.linear_qkv.{kind}", f"self_attn.{name}.{kind}") for kind in kinds]
    return [inner(mca, hf, shard=COLUMN) for mca, hf in rules]


def fused_mlp() -> list[Param]:
    """``linear_fc1`` and ``linear_fc2`` where HF too has one tensor for gate and up."""
    gate_up = inner("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", shard=GATED)
    return [gate_up, down(MLP, HF_MLP)]


def renamed(rules: Iterable[Param], names: Mapping[str, str]) -> list[Param]:
    """Return ``rules`` with other HF names: the first key of ``names`` in a name is replaced by its value."""

    def new_name(name: str) -> str:
        old = next((old for old in names if old in name), "")
        return name.replace(old, names[old]) if old else name

    @cache  # the rules of all layers and experts have the same few names
    def new_names(hf: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(new_name, hf))

    return [rule if new_names(rule.hf) == rule.hf else replace(rule, hf=new_names(rule.hf)) for rule in rules]


def in_fp32(rules: Iterable[Param], *ends: str) -> list[Param]:
    """``rules``, of which those whose names end so stay fp32 as the model is cast."""
    return [replace(rule, keep_fp32=True) if rule.mca.endswith(ends) else rule for rule in rules]


def dense_layers(config: McaModelConfig) -> list[Param]:
    """Every parameter of a model whose layers all have attention and one MLP, in checkpoint order."""
    return [embedding(), *in_layers(config, lambda own: [*attention(own), *dense_mlp(own)]), *head(config)]


def in_layers(config: McaModelConfig, rules: Callable[[McaModelConfig], Sequence[Param]]) -> Iterator[Param]:
    """Yield the ``rules`` of every decoder layer."""
    if config.layer_type_overrides is None:
        yield from expand_rules(rules(config), layers=range(config.num_layers))
        return
    for layer in range(config.num_layers):
        yield from expand_rules(rules(config.layer_config(layer)), layers=[layer])


def embedding() -> Param:
    """The word embedding."""
    return Param(mca=EMBEDDING, hf=(HF_EMBEDDING,), shard=COLUMN, stage=Stage.FIRST, vocab=True)


def positions() -> Param:
    """The table of learned positions."""
    return Param(
        mca="embedding.position_embeddings.weight", hf=("model.embed_positions.weight",), stage=Stage.FIRST
    )


def head(config: McaModelConfig) -> list[Param]:
    """Final norm and output layer; a tied output layer is an alias of the embedding, scores are not cut."""
    tied = config.head.tie_word_embeddings
    norm = Param(mca="decoder.final_layernorm.weight", hf=("model.norm.weight",), stage=Stage.NORM)
    norms = with_norm_biases(config, [norm])
    if config.head.num_labels is not None:
        kinds = ("weight", "bias") if config.head.head_kind == "token_classification" else ("weight",)
        names = [(f"output_layer.{kind}", f"{SCORE}.{kind}") for kind in kinds]
        return [*norms, *(Param(mca=mca, hf=(hf,), stage=Stage.LAST) for mca, hf in names)]
    last = Param(
        mca="output_layer.weight",
        hf=(HF_EMBEDDING if tied else HF_HEAD,),
        shard=COLUMN,
        stage=Stage.LAST,
        vocab=True,
        alias_of=EMBEDDING if tied else None,
    )
    bias = replace(last, mca="output_layer.bias", hf=(HF_HEAD_BIAS,), alias_of=None)
    return [*norms, last, *([bias] if config.head.output_bias else [])]
