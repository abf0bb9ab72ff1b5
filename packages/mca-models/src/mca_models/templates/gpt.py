"""GPT-2 and its heirs before Llama: GPT-J, GPT-NeoX, OPT, BLOOM, Falcon, Persimmon, StarCoder."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.types import FamilyConfig, JsonObject, Values
from mca_models.templates.config_table import (
    BOTH,
    GELU,
    RELU2,
    RELU2_MLP,
    ConfigTable,
    DropoutTogether,
    Field,
    Fixed,
    HfConfig,
    Lens,
    dense_fields,
    norm_epsilon,
    read_rope,
)
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts.common import (
    attention,
    dense_layers,
    dense_mlp,
    embedding,
    fused_qkv,
    grouped_qkv,
    head,
    positions,
    renamed,
    with_norm_biases,
)
from mca_models.templates.shapes import Shape
from mca_models.weights import Param, Stage, Transposed, expand_rules

FALCON_OUTER = {
    "model.layers.{layer}.self_attn": "transformer.h.{layer}.self_attention",
    "model.layers": "transformer.h",
    "model.embed_tokens": "transformer.word_embeddings",
    "model.final_layernorm": "transformer.ln_f",
}


def token_head(config: McaModelConfig) -> dict[str, str]:
    """Rename the token-classification head."""
    return {"score.": "classifier."} if config.head.head_kind == "token_classification" else {}


GPT2_INNER = {
    **{"self_attn.qkv_proj": "attn.c_attn", "self_attn.o_proj": "attn.c_proj", "input_layernorm": "ln_1"},
    **{"post_attention_layernorm": "ln_2", "up_proj": "c_fc", "down_proj": "c_proj"},
}


BARE = "hf_without_prefix"
"""The fact in ``extra`` that names begin with the parts of the model, as in the first published files."""


def gpt2_heads(hf: HfConfig) -> JsonObject:
    """Sizes of a head."""
    return {"num_query_groups": hf["n_head"], "kv_channels": hf["n_embd"] // hf["n_head"]}


def write_gpt2_heads(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {"activation_function": values["hidden_act"]}


def gpt2_layer_rules(config: McaModelConfig, projections: Sequence[Param]) -> list[Param]:
    """The rules of one layer under this family's names."""
    return renamed([*attention(config, projections), *dense_mlp(config)], GPT2_INNER)


def gpt2_around(config: McaModelConfig, rules: Sequence[Param]) -> list[Param]:
    """Every parameter of the model whose layers have ``rules``, in checkpoint order."""
    table = renamed([positions()], {"model.embed_positions": "transformer.wpe"})
    layers = expand_rules(rules, layers=range(config.num_layers))
    return renamed([embedding(), *table, *layers, *head(config)], GPT_OUTER | token_head(config))


GPT_OUTER = {
    **{"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f"},
    "model.layers": "transformer.h",
}


GPT_DROPOUTS = {"hidden_dropout": "resid_pdrop", "attention_dropout": "attn_pdrop"}


def gpt_masks(attention: str, config: FamilyConfig) -> frozenset[str]:
    """Masks that old files hold in each layer's ``attention``."""
    kinds = ("bias", "masked_bias")
    return frozenset(
        f"{attention.format(layer=layer)}.{kind}" for layer in range(config.num_layers) for kind in kinds
    )


FUSED_NAMES = {
    **{"o_proj": "dense", "q_norm": "q_layernorm", "k_norm": "k_layernorm"},
    **{"up_proj": "dense_h_to_4h", "down_proj": "dense_4h_to_h", "model.norm": "model.final_layernorm"},
}


FUSED_FIELDS = tuple(
    field
    for field in norm_epsilon(dense_fields(eps=1e-5), "layer_norm_eps")
    if field.mca not in ("num_query_groups", "kv_channels")
)


def equal_heads(hf: HfConfig) -> JsonObject:
    """Return the head sizes: multi-head attention with equal shares of the hidden size."""
    count = hf["num_attention_heads"]
    share = hf["hidden_size"] // count
    if hf.get("head_dim") not in (None, share):
        raise HfConfigError(
            f"config.json: 'head_dim' is {hf['head_dim']!r:.80}; the heads of this family divide the hidden size, "
            f"so that it must be {share}"
        )
    return {"num_query_groups": count, "kv_channels": share}


def fused_params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    rules = [*attention(config, grouped_qkv(config, "query_key_value")), *dense_mlp(config)]
    return renamed(
        [embedding(), *expand_rules(rules, layers=range(config.num_layers)), *head(config)], FUSED_NAMES
    )


# GPT-J: HF `GPTJForCausalLM`: parallel attention and MLP after one LayerNorm, biases in the MLP only.
INNER = {
    **{"self_attn.o_proj": "attn.out_proj", "self_attn.": "attn.", "input_layernorm": "ln_1"},
    **{"up_proj": "fc_in", "down_proj": "fc_out"},
}


def _gptj_derive(hf: HfConfig) -> JsonObject:
    """Sizes of a head, and how much of it is rotated, by a rope that transformers has no keys for."""
    width = hf["n_embd"] // hf["n_head"]
    sizes = {"num_query_groups": hf["n_head"], "kv_channels": width}
    rope = {"rotary_base": 10000.0, "rope_scaling": None}
    return {**sizes, **rope, "rotary_percent": (hf.get("rotary_dim") or width) / width}


def _gptj_write(values: Values) -> HfConfig:
    rotated = round(values["kv_channels"] * values["rotary_percent"])
    return {"rotary_dim": rotated, "activation_function": values["hidden_act"]}


def _gptj_params(config: McaModelConfig) -> list[Param]:
    return renamed(renamed(dense_layers(config), INNER), GPT_OUTER)


GPTJ = Family(
    model_type="gptj",
    architecture="GPTJForCausalLM",
    config=ConfigTable(
        fields=(
            Field("num_layers", "n_layer"),
            Field("hidden_size", "n_embd"),
            Field("num_attention_heads", "n_head"),
            Field("ffn_hidden_size", "n_inner", lambda hf: 4 * hf["n_embd"]),
            Field("vocab_size", "vocab_size"),
            Field("max_position_embeddings", "n_positions"),
            Field("layernorm_epsilon", "layer_norm_epsilon", 1e-5),
            Field("init_method_std", "initializer_range", 0.02),
            Field("tie_word_embeddings", "tie_word_embeddings", False),
            Field("hidden_act", "activation_function", "gelu_new"),
            *(Field(mca, hf, 0.0) for mca, hf in GPT_DROPOUTS.items()),
        ),
        defaults={"rotary_dim": 64},
        constants={
            **{"normalization": "LayerNorm", "parallel_block": "one_norm", "rotary_interleaved": True},
            **{"add_bias_linear": True, "add_bias_attention": False, "output_bias": True},
            "gated_linear_unit": False,
        },
        fixed=(Fixed("embd_pdrop", (0.0,), "embeddings have no dropout here"),),
        aliases={
            **{"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
            "max_position_embeddings": "n_positions",
        },
        facts=(Lens(_gptj_derive, _gptj_write),),
        partial_rotary=True,
    ),
    params=_gptj_params,
    ignored_hf=lambda config: gpt_masks("transformer.h.{layer}.attn", config),
)


# GPT-2: HF `GPT2LMHeadModel`: learned positions, LayerNorms, biases everywhere; weights stored as `[in, out]`.
def detect_extra(config: McaModelConfig, names: Collection[str], shapes: Mapping[str, Shape]) -> Values:
    """Return whether the names lack the prefix."""
    return {BARE: True} if "wte.weight" in names else {}


def masks(config: FamilyConfig) -> frozenset[str]:
    """Masks that old files hold."""
    start = "" if config.extra.get(BARE) else "transformer."
    return gpt_masks(f"{start}h.{{layer}}.attn", config)


def _gpt2_params(config: McaModelConfig) -> list[Param]:
    turned = [
        replace(rule, hf_layout=Transposed(rule.hf_layout)) if rule.mca.endswith(_LINEARS) else rule
        for rule in gpt2_layer_rules(config, fused_qkv(config))
    ]
    named = gpt2_around(config, turned)
    return renamed(named, {"transformer.": ""}) if config.extra.get(BARE) else named


_LINEARS = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")
GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    config=ConfigTable(
        fields=(
            *(its for its in GPTJ.table.fields if its.mca not in ("tie_word_embeddings", *GPT_DROPOUTS)),
            Field("tie_word_embeddings", "tie_word_embeddings", True),
            *(Field(mca, hf, 0.1) for mca, hf in GPT_DROPOUTS.items()),
            Field("embedding_dropout", "embd_pdrop", 0.1),
        ),
        defaults={"n_positions": 1024},
        constants={
            **{"normalization": "LayerNorm", "add_bias_linear": True, "gated_linear_unit": False},
            "learned_positions": True,
        },
        fixed=(
            DropoutTogether("embd_pdrop", "resid_pdrop", 0.1),
            Fixed("scale_attn_weights", (True,), "scores are divided by the root of a head's channels"),
            Fixed("scale_attn_by_inverse_layer_idx", (False,), "scores of all layers have one scale"),
            Fixed("add_cross_attention", (False,), "a decoder without an encoder"),
        ),
        aliases=GPTJ.table.aliases,
        facts=(Lens(gpt2_heads, write_gpt2_heads),),
    ),
    params=_gpt2_params,
    detect_extra=detect_extra,
    ignored_hf=masks,
    module_names={BARE: False},
    fp8_unsupported="its weights are stored as [in, out]",
)


# GPT BigCode, StarCoder 1: HF `GPTBigCodeForCausalLM`: GPT-2 with multi-query attention.
def _bigcode_derive(hf: HfConfig) -> JsonObject:
    """Sizes of a head, and how many there are of keys."""
    shared = {"num_query_groups": 1} if hf.get("multi_query", True) else {}
    return {**gpt2_heads(hf), **shared}


def _bigcode_write(values: Values) -> HfConfig:
    return {**write_gpt2_heads(values), "multi_query": values["num_query_groups"] == 1}


def _bigcode_params(config: McaModelConfig) -> list[Param]:
    shared = config.attention.num_query_groups == 1  # else q, k and v of each head lie together
    projections = fused_qkv(config) if shared else grouped_qkv(config, "qkv_proj")
    return gpt2_around(config, gpt2_layer_rules(config, projections))


GPT_BIGCODE = Family(
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    config=replace(
        GPT2.table,
        defaults={**GPT2.table.defaults, "activation_function": GELU},
        facts=(Lens(_bigcode_derive, _bigcode_write),),
    ),
    params=_bigcode_params,
)


# GPT-NeoX and Pythia: HF `GPTNeoXForCausalLM`: parallel attention and MLP, each after a LayerNorm.
OUTER = {
    "model.layers.{layer}.self_attn": "gpt_neox.layers.{layer}.attention",
    "model.embed_tokens": "gpt_neox.embed_in",
    "model.final_layernorm": "gpt_neox.final_layer_norm",
    "model.": "gpt_neox.",
}
MODULES = "module_names"
"""The fact in ``extra`` that the output layer is called as transformers' module, not as files call it."""


def _neox_derive(hf: HfConfig) -> JsonObject:
    """Derive the parallel block, and RoPE under this family's names."""
    base, share = hf.get("rotary_emb_base", 1e4), hf.get("rotary_pct", 0.25)
    rope = {**hf, "rope_theta": base, "partial_rotary_factor": share}
    side_by_side = hf.get("use_parallel_residual", True)
    return {**equal_heads(hf), **read_rope(rope), "parallel_block": "two_norms" if side_by_side else "none"}


def _neox_write(values: Values) -> HfConfig:
    return {"use_parallel_residual": values["parallel_block"] != "none"}


def _neox_params(config: McaModelConfig) -> list[Param]:
    output = {} if config.extra.get(MODULES) else {"lm_head": "embed_out"}
    return renamed(fused_params(config), OUTER | output | token_head(config))


GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    config=ConfigTable(
        fields=(
            *(field for field in FUSED_FIELDS if field.mca != "pad_token_id"),  # its row is trained
            Field("hidden_act", "hidden_act", "gelu"),
        ),
        constants={"normalization": "LayerNorm", "add_bias_linear": True, "gated_linear_unit": False},
        fixed=(
            Fixed("attention_bias", (True,), BOTH),
            Fixed("hidden_dropout", (0.0,), "embeddings have no dropout here"),
        ),
        facts=(Lens(_neox_derive, _neox_write),),
        partial_rotary=True,
    ),
    params=_neox_params,
    module_names={MODULES: True},
    ignored_hf=lambda config: gpt_masks("gpt_neox.layers.{layer}.attention", config),
)


# Persimmon: HF `PersimmonForCausalLM`: LayerNorms, also as QK-norm, biases, squared ReLU.
PERSIMMON = Family(
    model_type="persimmon",
    architecture="PersimmonForCausalLM",
    config=ConfigTable(
        fields=(*FUSED_FIELDS, Field("qk_layernorm", "qk_layernorm", True)),
        defaults={"partial_rotary_factor": 0.5},
        constants={**RELU2_MLP, "normalization": "LayerNorm", "add_bias_linear": True},
        fixed=(RELU2, Fixed("hidden_dropout", (0.0,), "transformers drops after the MLP only")),
        facts=(Lens(equal_heads),),
        partial_rotary=True,
    ),
    params=fused_params,
)


# StarCoder 2: HF `Starcoder2ForCausalLM`: LayerNorms, biases everywhere, an MLP without a gate.
def _starcoder2_params(config: McaModelConfig) -> list[Param]:
    return renamed(dense_layers(config), {"up_proj": "c_fc", "down_proj": "c_proj"})


STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    config=ConfigTable(
        fields=(
            *norm_epsilon(dense_fields(tied=True, eps=1e-5), "norm_epsilon"),
            Field("add_bias_linear", "use_bias", True),
            Field("window_size", "sliding_window", None),
            Field("hidden_dropout", "residual_dropout", 0.0),
            Field("embedding_dropout", "embedding_dropout", 0.0),
        ),
        defaults={"num_key_value_heads": 2, "initializer_range": 0.018042},
        constants={"normalization": "LayerNorm", "hidden_act": GELU, "gated_linear_unit": False},
        fixed=(
            Fixed("hidden_act", (GELU,), "this family's MLP"),
            DropoutTogether("embedding_dropout", "residual_dropout"),
        ),
    ),
    params=_starcoder2_params,
)


# OPT: HF `OPTForCausalLM`: learned positions, LayerNorms, biases everywhere, ReLUs.
_OPT_INNER = {
    **{"input_layernorm": "self_attn_layer_norm", "post_attention_layernorm": "final_layer_norm"},
    **{"o_proj": "out_proj", "mlp.up_proj": "fc1", "mlp.down_proj": "fc2"},
}
_OPT_OUTER = {"model.norm": "model.decoder.final_layer_norm", "model.": "model.decoder."}
_OPT_OTHERS = ("ffn_hidden_size", "num_query_groups", "kv_channels", "layernorm_epsilon", "init_method_std")


def _opt_derive(hf: HfConfig) -> JsonObject:
    """Sizes of a head."""
    heads, size = hf["num_attention_heads"], hf["hidden_size"]
    own = Fixed("word_embed_proj_dim", (size, None), "embeddings are as wide as layers")
    own.check({"word_embed_proj_dim": size, **hf})
    return {"num_query_groups": heads, "kv_channels": size // heads}


def _opt_write(values: Values) -> HfConfig:
    return {"activation_function": values["hidden_act"], "do_layer_norm_before": True}


def _opt_params(config: McaModelConfig) -> list[Param]:
    rules = renamed([*attention(config), *dense_mlp(config)], _OPT_INNER)
    layers = expand_rules(rules, layers=range(config.num_layers))
    return renamed([embedding(), positions(), *layers, *head(config)], _OPT_OUTER)


OPT = Family(
    model_type="opt",
    architecture="OPTForCausalLM",
    config=ConfigTable(
        fields=(
            *(its for its in dense_fields(tied=True) if its.mca not in _OPT_OTHERS),
            Field("ffn_hidden_size", "ffn_dim", 3072),
            Field("init_method_std", "init_std", 0.02),
            Field("add_bias_linear", "enable_bias", True),
            Field("hidden_act", "activation_function", "relu"),
            Field("hidden_dropout", "dropout", 0.1),
        ),
        defaults={"pad_token_id": 1, "max_position_embeddings": 2048},
        constants={
            **{"normalization": "LayerNorm", "layernorm_epsilon": 1e-5, "gated_linear_unit": False},
            **{"learned_positions": True, "position_offset": 2},
        },
        fixed=(
            Fixed("do_layer_norm_before", (True,), "350M alone has its post-norms, on the residual"),
            Fixed("_remove_final_layer_norm", (False,), "there is a last norm"),
            Fixed("layer_norm_elementwise_affine", (True,), "norms have weights"),
            Fixed("layerdrop", (0.0, 0), "no layer is left out in training"),
        ),
        facts=(Lens(_opt_derive, _opt_write),),
    ),
    params=_opt_params,
)


# BLOOM: HF `BloomForCausalLM`: ALiBi, LayerNorms, of embeddings too, biases everywhere.
_BLOOM_NORM = Param(
    mca="embedding.layernorm.weight", hf=("model.word_embeddings_layernorm.weight",), stage=Stage.FIRST
)


def _bloom_heads(hf: HfConfig) -> int:
    return int(hf.get("n_head") or hf.get("num_attention_heads") or 8)


def _bloom_size(hf: HfConfig) -> int:
    return int(hf.get("n_embed") or hf.get("hidden_size") or 64)


def _bloom_derive(hf: HfConfig) -> JsonObject:
    """Sizes of heads and of the MLP; positions have no end."""
    heads, size = _bloom_heads(hf), _bloom_size(hf)
    ends = {"max_position_embeddings": hf.get("seq_length") or 2048, "ffn_hidden_size": 4 * size}
    return {"num_query_groups": heads, "kv_channels": size // heads, **ends}


def _bloom_write(values: Values) -> HfConfig:
    return {"seq_length": values["max_position_embeddings"]}


def _bloom_extra(config: McaModelConfig, names: Collection[str], shapes: Mapping[str, Shape]) -> Values:
    """Return whether the names lack the prefix, as in the first published files."""
    return {BARE: True} if "word_embeddings.weight" in names else {}


def _bloom_params(config: McaModelConfig) -> list[Param]:
    first, *rest = fused_params(config)
    own = {"model.word_embeddings_layernorm": "transformer.word_embeddings_layernorm"}
    norm = renamed(with_norm_biases(config, [_BLOOM_NORM]), own)
    named = [*renamed([first], FALCON_OUTER), *norm, *renamed(rest, FALCON_OUTER | token_head(config))]
    return renamed(named, {"transformer.": ""}) if config.extra.get(BARE) else named


BLOOM = Family(
    model_type="bloom",
    architecture="BloomForCausalLM",
    config=ConfigTable(
        fields=(
            Field("num_layers", "n_layer", lambda hf: hf.get("num_hidden_layers", 2)),
            Field("hidden_size", "hidden_size", _bloom_size),
            Field("num_attention_heads", "n_head", _bloom_heads),
            Field("vocab_size", "vocab_size"),
            Field("layernorm_epsilon", "layer_norm_epsilon", 1e-5),
            Field("init_method_std", "initializer_range", 0.02),
            Field("tie_word_embeddings", "tie_word_embeddings", True),
            Field("hidden_dropout", "hidden_dropout", 0.0),
            Field("attention_dropout", "attention_dropout", 0.0),
        ),
        constants={
            **{"normalization": "LayerNorm", "add_bias_linear": True, "gated_linear_unit": False},
            **{"alibi": True, "embedding_layernorm": True, "hidden_act": "gelu_pytorch_tanh"},
        },
        fixed=(
            Fixed(
                "apply_residual_connection_post_layernorm", (False,), "residuals are what was not normalized"
            ),
        ),
        aliases={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
        facts=(Lens(_bloom_derive, _bloom_write),),
    ),
    params=_bloom_params,
    detect_extra=_bloom_extra,
    module_names={BARE: False},
)


# Falcon with RoPE: HF `FalconForCausalLM`: parallel attention and MLP after one or two LayerNorms.
_FALCON_NORMS = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}


def _falcon_derive(hf: HfConfig) -> JsonObject:
    """Derive the parallel block, the norms, and the number of query groups."""
    heads, new = hf["num_attention_heads"], hf.get("new_decoder_architecture", False)
    two = (hf.get("num_ln_in_parallel_attn") or (2 if new else 1)) == 2
    block = ("two_norms" if two else "one_norm") if hf.get("parallel_attn", True) else "none"
    if new and block == "none":
        raise HfConfigError(
            "config.json: 'parallel_attn' is false; supported with new_decoder_architecture: true (transformers fails)"
        )
    if block == "two_norms" and not new:
        raise HfConfigError(
            "config.json: 'num_ln_in_parallel_attn' is 2; supported without new_decoder_architecture: 1 (transformers "
            "fails)"
        )
    behind, drops = hf.get("hidden_dropout", 0.0), hf.get("attention_dropout", 0.0)
    if block == "none" and behind != drops:
        raise HfConfigError(
            f"config.json: 'attention_dropout' is {drops} and 'hidden_dropout' {behind}; supported without "
            "parallel_attn: the same (transformers drops behind attention with the former)"
        )
    if block != "none" and behind:
        raise HfConfigError(
            f"config.json: 'hidden_dropout' is {behind}; supported with parallel_attn: 0 (transformers drops the sum "
            "of attention and MLP)"
        )
    groups = 1 if hf.get("multi_query", True) and not new else hf.get("num_kv_heads") or heads
    return {
        "parallel_block": block,
        "num_query_groups": groups,
        "kv_channels": hf["hidden_size"] // heads,
        "attention_dropout": 0.0,  # with RoPE, transformers drops no weights of attention
    }


def _falcon_write(values: Values) -> HfConfig:
    groups, apart = values["num_query_groups"], values["parallel_block"] == "none"
    new = not apart and (groups > 1 or values["parallel_block"] == "two_norms")
    norms = 2 if values["parallel_block"] == "two_norms" else 1
    side = {"parallel_attn": not apart, "num_ln_in_parallel_attn": norms}
    act = {"activation": values["hidden_act"], "alibi": False}
    heads = {"num_kv_heads": groups, **({} if new else {"multi_query": groups == 1})}
    drops = {"attention_dropout": values["hidden_dropout"]}
    return {**side, **act, **drops, **heads, "new_decoder_architecture": new}


_FALCON_OTHERS = ("pad_token_id", "num_query_groups", "kv_channels", "ffn_hidden_size")


def _falcon_params(config: McaModelConfig) -> list[Param]:
    rules = renamed(fused_params(config), FALCON_OUTER | token_head(config))
    return renamed(rules, _FALCON_NORMS) if config.block.parallel_block == "two_norms" else rules


FALCON = Family(
    model_type="falcon",
    architecture="FalconForCausalLM",
    config=ConfigTable(
        fields=(
            *(
                field
                for field in norm_epsilon(dense_fields(tied=True, eps=1e-5), "layer_norm_epsilon")
                if field.mca not in _FALCON_OTHERS
            ),
            Field("ffn_hidden_size", "ffn_hidden_size", lambda hf: 4 * hf["hidden_size"]),
            Field("add_bias_linear", "bias", False),
            Field("hidden_act", "activation", "gelu"),
            Field("hidden_dropout", "hidden_dropout", 0.0),
        ),
        defaults={"max_position_embeddings": 2048},
        constants={"normalization": "LayerNorm", "gated_linear_unit": False},
        fixed=(Fixed("alibi", (False,), "only rotary positions are built here"),),
        facts=(Lens(_falcon_derive, _falcon_write),),
    ),
    params=_falcon_params,
    fp8_unsupported="its linears are not nn.Linear",
)

FAMILIES = by_type(GPTJ, GPT2, GPT_BIGCODE, GPT_NEOX, PERSIMMON, STARCODER2, OPT, BLOOM, FALCON)
