"""MiniMax M3, the text model: HF ``MiniMaxM3VLForCausalLM``: block-sparse attention with an indexer in some layers."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import chain

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import ConfigTable, Field, Fixed, HfConfig, dense_fields, read_rope
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import attention, embedding, head, inner
from mca_models.templates.parts.moe import (
    SCALED,
    SIGMOID_ROUTER,
    aux_loss,
    expert_fields,
    mlp_layers,
    require_sigmoid_routing,
    write_aux_loss,
    write_moe_layers,
)
from mca_models.templates.parts.names import BLOCK_SPARSE_BIASED
from mca_models.templates.parts.passthrough import with_mtp_passthrough
from mca_models.templates.shapes import Shape
from mca_models.weights import SEPARATE, Param, expand_rules

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


def derive(hf: HfConfig) -> JsonObject:
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


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
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


CONFIG = ConfigTable(
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
    facts=(Lens(derive, write),),
    partial_rotary=True,
)


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


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
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


FAMILY = with_mtp_passthrough(
    Family(
        model_type="minimax_m3_vl_text",
        architecture="MiniMaxM3VLForCausalLM",
        config=CONFIG,
        params=params,
        moe=NAMES,
        detect_extra=detect_extra,
        module_names={MODULES: True},
    )
)
