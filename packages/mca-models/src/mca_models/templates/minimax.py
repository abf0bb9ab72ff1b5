"""MiniMax 1 to 3."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates import get_family
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    SILU,
    ConfigTable,
    Field,
    Fixed,
    HfConfig,
    Lens,
    dense_fields,
    read_rope,
)
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts.clip_tower import encoder_layer
from mca_models.templates.parts.common import attention, embedding, head, inner
from mca_models.templates.parts.lightning_attention import lightning_attention
from mca_models.templates.parts.moe import (
    AUX_LOSS,
    NO_JITTER,
    SCALED,
    SIGMOID_ROUTER,
    SIGMOID_ROUTING,
    aux_loss,
    expert_fields,
    mlp_layers,
    moe_params,
    require_sigmoid_routing,
    write_aux_loss,
    write_moe_layers,
)
from mca_models.templates.parts.names import BLOCK_SPARSE, BLOCK_SPARSE_BIASED
from mca_models.templates.parts.passthrough import with_mtp_passthrough
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    PROJECTOR,
    TOWER,
    NestedTextConfig,
    Shapes,
    Spelling,
    VisionModel,
    linear,
    module_spelling,
    norm,
    repeat_shapes,
)
from mca_models.templates.parts.vision_values import vision_values
from mca_models.templates.shapes import Shape
from mca_models.weights import SEPARATE, Param, expand_rules

MIXTRAL = get_family("mixtral")


# MiniMax-Text-01: HF `MiniMaxForCausalLM`: lightning attention in most layers, Mixtral's experts.
# The residual stream goes through the norms, with factors.
_LINEAR, _FULL = "linear_attention", "full_attention"
_BUFFERS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


def _kinds(hf: HfConfig) -> list[str]:
    layers = range(hf["num_hidden_layers"])
    return list(hf.get("layer_types") or [_LINEAR if layer % 2 else _FULL for layer in layers])


def read(hf: HfConfig) -> JsonObject:
    """Derive the kinds of layers, and the sizes of lightning attention and the factors of both kinds."""
    kinds = _kinds(hf)
    factors = {
        part: tuple(
            hf.get(f"{'linear' if kind == _LINEAR else 'full'}_attn_{name}_factor", 1) for kind in kinds
        )
        for part, name in (("residual", "alpha"), ("output", "beta"))
    }
    heads = hf["num_attention_heads"]
    return {
        "layer_types": tuple("lightning" if kind == _LINEAR else kind for kind in kinds),
        "lightning_num_heads": heads,
        "lightning_head_dim": hf.get("head_dim") or hf["hidden_size"] // heads,
        **{f"attention_{part}_factors": found for part, found in factors.items()},
    }


def _m1_write(values: Values) -> HfConfig:
    kinds = [_LINEAR if kind == "lightning" else kind for kind in values["layer_types"]]
    found: HfConfig = {"layer_types": kinds}
    for part, name in (("residual", "alpha"), ("output", "beta")):
        factors = values[f"attention_{part}_factors"]
        for kind, factor in zip(kinds, factors, strict=True):
            found[f"{'linear' if kind == _LINEAR else 'full'}_attn_{name}_factor"] = factor
    return found


def ignored(config: McaModelConfig) -> frozenset[str]:
    """Return the tables of decays that transformers saves, and computes itself."""
    layers = [i for i in range(config.num_layers) if config.is_lightning_layer(i)]
    return frozenset(f"model.layers.{layer}.self_attn.{name}" for layer in layers for name in _BUFFERS)


def _m1_params(config: McaModelConfig) -> list[Param]:
    kinds = {True: lightning_attention(config), False: attention(config)}
    layers = (
        expand_rules(kinds[config.is_lightning_layer(layer)], layers=[layer])
        for layer in range(config.num_layers)
    )
    return [embedding(), *chain.from_iterable(layers), *mlp_layers(config, BLOCK_SPARSE), *head(config)]


MINIMAX = Family(
    model_type="minimax",
    architecture="MiniMaxForCausalLM",
    config=ConfigTable(
        fields=(
            *MIXTRAL.table.fields,
            Field("mlp_residual_factor", "mlp_alpha_factor", 1),
            Field("mlp_output_factor", "mlp_beta_factor", 1),
        ),
        defaults=MIXTRAL.table.defaults,
        constants={"normed_residual": True},
        fixed=MIXTRAL.table.fixed,
        aliases=MIXTRAL.table.aliases,
        facts=(*MIXTRAL.table.facts, Lens(read, _m1_write)),
    ),
    params=_m1_params,
    moe=BLOCK_SPARSE,
    ignored_hf=ignored,
)


# MiniMax M2: HF `MiniMaxM2ForCausalLM`: sigmoid routing with a bias, QK-norm over all heads.
def _m2_derive(hf: HfConfig) -> JsonObject:
    """The rotated share of a head, which published files give in channels."""
    rope = read_rope(hf)
    if hf.get("rotary_dim") and rope["rotary_percent"] == 1.0:
        rope["rotary_percent"] = hf["rotary_dim"] / hf["head_dim"]
    return rope


MINIMAX_M2 = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    config=ConfigTable(
        fields=(
            *dense_fields(),
            *expert_fields(count="num_local_experts", default=256, ffn="intermediate_size"),
        ),
        defaults={"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5e6},
        constants={"qk_layernorm": True, "qk_layernorm_full_width": True, **SIGMOID_ROUTER},
        fixed=(
            SILU,
            NO_ATTENTION_BIAS,
            NO_JITTER,
            Fixed("scoring_func", ("sigmoid",), "MiniMax M2's router"),
            Fixed("use_qk_norm", (True,), "all published models have these norms"),
        ),
        aliases={"num_experts": "num_local_experts"},
        facts=(SIGMOID_ROUTING, Lens(_m2_derive), AUX_LOSS),
        partial_rotary=True,
    ),
    params=partial(moe_params, names=BLOCK_SPARSE_BIASED),
    moe=BLOCK_SPARSE_BIASED,
)


# MiniMax M3, the text model: HF `MiniMaxM3VLForCausalLM`: block-sparse attention with an indexer in some layers.
NAMES = replace(
    BLOCK_SPARSE_BIASED,
    shared="block_sparse_moe.shared_experts.",
    in_memory=(("block_sparse_moe.e_score", "mlp.gate.e_score"), ("block_sparse_moe.", "mlp.")),
)
OF_MODULES = replace(
    NAMES,
    router=NAMES.loaded(NAMES.router),
    router_bias=NAMES.loaded(NAMES.router_bias),
    shared=NAMES.loaded(NAMES.shared),
)
MODULES = "hf_names_of_modules"
"""The fact in ``extra`` that files name things as transformers' modules do, which the published ones do not."""
_SPARSE, _KINDS = "minimax_m3_sparse", ("minimax_m3_sparse", "full_attention")
_INDEX = {
    "channels": ("index_head_dim", "sparse_index_dim", 128),
    "size": ("index_block_size", "sparse_block_size", 128),
    "topk": ("index_topk_blocks", "sparse_topk_blocks", 16),
    "local": ("index_local_blocks", "sparse_local_block", 1),
}
"""Sizes of an indexer: HF's key, that within ``sparse_attention_config``, and what an absent one means."""
_HEADS = ("index_n_heads", "sparse_num_index_heads", 4)
_MOST = 1 << 20
"""Largest value of each size: keys are padded to full blocks."""


def _m3_derive(hf: HfConfig) -> JsonObject:
    """Derive the layers with an indexer and with experts, and the load-balancing loss."""
    require_sigmoid_routing(hf)
    count, inside = hf["num_hidden_layers"], hf.get("sparse_attention_config") or {}
    indexed, sparse = inside.get("sparse_attention_freq"), hf.get("moe_layer_freq")
    kinds = hf.get("layer_types") or [_KINDS[not yes] for yes in indexed or (0,) * count]
    mlps = hf.get("mlp_layer_types") or ["sparse" if yes else "dense" for yes in sparse or (1,) * count]
    if unknown := set(kinds) - set(_KINDS):
        raise HfConfigError(
            f"config.json: 'layer_types' has {sorted(unknown)!r:.80}; supported: {', '.join(_KINDS)}"
        )
    return {
        "layer_types": tuple("sparse_attention" if kind == _SPARSE else kind for kind in kinds),
        "moe_layer_freq": tuple(int(kind == "sparse") for kind in mlps),
        "index_blocks": blocks(hf, inside) if _SPARSE in kinds else None,
        **aux_loss(hf),
    }


def blocks(hf: HfConfig, inside: Values) -> JsonObject:
    """Return ``McaModelConfig.index_blocks``."""
    found = {name: _number(hf, inside, *keys) for name, keys in {**_INDEX, "heads": _HEADS}.items()}
    heads = found.pop("heads")
    if heads != hf["num_key_value_heads"]:
        raise HfConfigError(
            f"config.json: 'index_n_heads' is {heads}; supported: {hf['num_key_value_heads']}, the number of "
            "key/value heads"
        )
    rotated = int(hf["head_dim"] * read_rope(hf)["rotary_percent"])
    if found["channels"] < rotated:
        raise HfConfigError(
            f"config.json: 'index_head_dim' is {found['channels']}; supported: at least the {rotated} channels that "
            "are rotated"
        )
    if found["local"] > found["topk"]:
        raise HfConfigError(
            f"config.json: 'index_local_blocks' is {found['local']}; supported: up to index_topk_blocks, which is "
            f"{found['topk']}"
        )
    return found


def _number(hf: HfConfig, inside: Values, key: str, legacy: str, default: int) -> int:
    value = inside.get(legacy, hf.get(key, default))
    least = 0 if key == "index_local_blocks" else 1
    if type(value) is not int or not least <= value <= _MOST:
        raise HfConfigError(
            f"config.json: '{key}' is {value!r:.80}; supported: whole numbers from {least} to {_MOST}"
        )
    return value


def _m3_write(values: Values) -> HfConfig:
    kinds = (_SPARSE if kind == "sparse_attention" else kind for kind in values["layer_types"] or ())
    index = values["index_blocks"] or {name: default for name, (_, _, default) in _INDEX.items()}
    return {
        "hidden_act": "silu",
        "layer_types": list(kinds),
        "index_n_heads": values["num_query_groups"],
        **{key: index[name] for name, (key, _, _) in _INDEX.items()},
        **write_moe_layers(values),
        **write_aux_loss(values),
    }


def detect_extra(config: McaModelConfig, names: Collection[str], shapes: Mapping[str, Shape]) -> Values:
    """Return whether transformers wrote the files of the text model alone."""
    own = any(name.endswith((".mlp.gate.weight", ".mlp.gate_up_proj.weight")) for name in names)
    return {MODULES: True} if own else {}


def indexer(config: McaModelConfig) -> Iterator[Param]:
    """Return the rules of the indexer, which chooses blocks of keys."""
    for name in ("q_proj", "k_proj", "q_norm", "k_norm"):
        its = f"indexer.{name}" if config.extra.get(MODULES) else f"index_{name}"
        mca = f"self_attention.core_attention.indexer.{name}.weight"
        yield inner(mca, f"self_attn.{its}.weight")


def _one_tensor(rule: Param) -> Param:
    """``rule`` with HF's gate and up, if that is what it is made of, in one tensor."""
    if not rule.hf[0].endswith(".gate_proj.weight"):
        return rule
    return replace(
        rule, hf=(rule.hf[0].replace(".gate_proj.", ".gate_up_proj."),), layout=SEPARATE, hf_layout=SEPARATE
    )


def _m3_params(config: McaModelConfig) -> list[Param]:
    kinds = enumerate(config.layer_types or ())
    layers = (
        expand_rules(
            [*attention(config), *(indexer(config) if kind == "sparse_attention" else ())], layers=[layer]
        )
        for layer, kind in kinds
    )
    modules = config.extra.get(MODULES)
    names = OF_MODULES if modules else NAMES
    rules = [embedding(), *chain.from_iterable(layers), *mlp_layers(config, names), *head(config)]
    return [_one_tensor(rule) for rule in rules] if modules else rules


MINIMAX_M3_VL_TEXT = with_mtp_passthrough(
    Family(
        model_type="minimax_m3_vl_text",
        architecture="MiniMaxM3VLForCausalLM",
        config=ConfigTable(
            fields=(
                *(field for field in dense_fields() if field.mca != "ffn_hidden_size"),
                Field("ffn_hidden_size", "dense_intermediate_size", 12288),
                *expert_fields(count="num_local_experts", default=128, ffn="intermediate_size"),
                Field("moe_shared_expert_intermediate_size", "shared_intermediate_size", 3072),
                Field("activation_func_clamp_value", "swiglu_limit", 7.0),
                SCALED,
            ),
            defaults={
                **{"num_key_value_heads": 4, "head_dim": 128, "rope_theta": 5e6},
                **{"num_experts_per_tok": 4, "routed_scaling_factor": 2.0},
            },
            constants={
                **{"layernorm_zero_centered_gamma": True, "qk_layernorm": True},
                **{"hidden_act": "quick_gelu", "glu_linear_offset": 1.0},
                **SIGMOID_ROUTER,
            },
            fixed=(Fixed("swiglu_alpha", (1.702,), "Megatron's quick_gelu has it built in"),),
            aliases={"num_experts": "num_local_experts"},
            facts=(Lens(_m3_derive, _m3_write),),
            partial_rotary=True,
        ),
        params=_m3_params,
        moe=NAMES,
        detect_extra=detect_extra,
        module_names={MODULES: True},
    )
)


# MiniMax M3: HF `MiniMaxM3SparseForConditionalGeneration`: a tower of CLIP's layers and the text model.
_INNER = f"{TOWER}vision_model."
PUBLISHED = Spelling(
    "language_model.model.",
    "language_model.lm_head.",
    {
        f"{TOWER}embeddings.proj.": f"{_INNER}embeddings.patch_embedding.",
        f"{TOWER}layers.": f"{_INNER}encoder.layers.",
        f"{TOWER}pre_layrnorm.": f"{_INNER}pre_layrnorm.",
        f"{PROJECTOR}merge_": "patch_merge_mlp.",
        PROJECTOR: PROJECTOR,
    },
)


def _tensors(config: McaModelConfig) -> Shapes:
    about, vision = vision_values(config)
    width, inner = vision.size("hidden_size", 1280), vision.size("intermediate_size", 5120)
    size, times = vision.size("patch_size", 14), vision.size("temporal_patch_size", 2)
    between, merged = about.size("projector_hidden_size", 6144), vision.size("spatial_merge_size", 2) ** 2
    return {
        f"{TOWER}embeddings.proj.weight": (width, vision.size("num_channels", 3), times, size, size),
        **norm(f"{TOWER}pre_layrnorm", width),
        **repeat_shapes(
            f"{TOWER}layers", vision.layers("num_hidden_layers", 32), encoder_layer(width, inner)
        ),
        **linear(f"{PROJECTOR}linear_1", between, width),
        **linear(f"{PROJECTOR}linear_2", config.hidden_size, between),
        **linear(f"{PROJECTOR}merge_linear_1", between, config.hidden_size * merged),
        **linear(f"{PROJECTOR}merge_linear_2", config.hidden_size, between),
    }


MINIMAX_M3_VL = vision_language_family(
    "minimax_m3_vl",
    "MiniMaxM3SparseForConditionalGeneration",
    {"minimax_m3_vl_text": MINIMAX_M3_VL_TEXT},
    VisionModel(
        tensors=_tensors,
        spellings=(PUBLISHED, module_spelling(TOWER, PROJECTOR)),
        projector=(PROJECTOR,),
        image_tokens=None,
    ),
    NestedTextConfig(text_ties="too"),
)

FAMILIES = by_type(MINIMAX, MINIMAX_M2, MINIMAX_M3_VL_TEXT, MINIMAX_M3_VL)
