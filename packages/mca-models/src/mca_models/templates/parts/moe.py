"""Rules of mixture-of-experts layers: router, experts, shared experts.

Megatron and `mca_models.megatron.features` route the tokens.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from mca_config.errors import HfConfigError
from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import Field, Fixed, HfConfig, Lens, is_moe_layer
from mca_models.templates.parts.common import (
    MLP,
    attention,
    dense_mlp,
    down,
    embedding,
    gate_up,
    head,
    in_layers,
    inner,
    norms_around_mlp,
    up,
)
from mca_models.templates.parts.layer_costs import ExpertSizes
from mca_models.templates.parts.mtp import mtp_params
from mca_models.templates.parts.names import FUSED, HF, MoeNames
from mca_models.templates.parts.sliding_window import write_window
from mca_models.templates.shapes import Shape
from mca_models.weights import COLUMN, GATED, ROW, SEPARATE, Concat, Layout, Param, Transposed, expand_rules

SIGMOID_ROUTER: Values = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_pre_softmax": True,
}
"""Sigmoid router: top-k with an expert bias, weights normalized over the top-k."""

TRANSPOSED = "transposed_experts"
"""The fact in ``extra`` that stacked experts lie as ``[experts, in, out]``."""

LATENT = ("mlp.fc1_latent_proj.weight", "mlp.fc2_latent_proj.weight")
"""The projections of what routed experts get and give."""

NO_JITTER = Fixed(
    "router_jitter_noise",
    (0.0, None),
    "transformers shakes the experts' input too, Megatron the router's alone",
)


def require_sigmoid_routing(hf: HfConfig) -> None:
    """Reject configurations for which Megatron's sigmoid routing differs from HF's.

    Raises:
        McaError: One expert for a token, whose weight Megatron does not normalize; groups without two experts, by
            whose sum they are chosen; more groups for a token than there are; or fewer experts in a token's groups
            than it is sent to, of which the others are then any.
    """
    topk, groups = hf["num_experts_per_tok"], hf.get("n_group") or 1
    experts = hf.get("n_routed_experts") or hf.get("num_local_experts") or 2 * groups
    if topk < 2:
        raise HfConfigError(
            f"config.json: 'num_experts_per_tok' is {topk}; supported: 2 or more (Megatron does not normalize a "
            "single sigmoid score)"
        )
    if groups > 1 and experts < 2 * groups:
        raise HfConfigError(
            f"config.json: 'n_group' is {groups}, for {experts} experts; supported: up to {experts // 2} (groups are "
            "chosen by their two best experts)"
        )
    if groups > 1 and (hf.get("topk_group") or 1) > groups:
        raise HfConfigError(
            f"config.json: 'topk_group' is {hf['topk_group']}, for {groups} groups of experts; supported: up to "
            f"{groups}, or a larger 'n_group'"
        )
    if groups > 1 and topk > (allowed := experts // groups * (hf.get("topk_group") or 1)):
        raise HfConfigError(
            f"config.json: 'num_experts_per_tok' is {topk}, in groups of which a token may be sent to {allowed} "
            f"experts; supported: up to {allowed}, or a larger 'topk_group'"
        )


def expert_sizes(config: McaModelConfig) -> ExpertSizes | None:
    """Return the sizes of the MoE layers; None: the model has none."""
    moe = config.moe
    if moe is None:
        return None
    return ExpertSizes(
        experts=moe.num_moe_experts,
        choices=moe.num_router_choices,
        topk=moe.moe_router_topk,
        hidden=moe.moe_latent_size or config.hidden_size,
        inner=moe.moe_ffn_hidden_size or config.mlp.ffn_hidden_size,
        shared=moe.moe_shared_expert_intermediate_size or 0,
        dense_mlp=moe.moe_parallel_dense_mlp,
        post_norm=moe.moe_post_norm,
        shortcut=moe.moe_shortcut,
    )


def router(config: McaModelConfig, names: MoeNames) -> list[Param]:
    """The norms around an expert layer, its router, and the bias that only chooses experts."""
    weight, bias = names.router, names.router_bias
    if config.extra.get("fused_experts"):
        weight, bias = names.loaded(weight), names.loaded(bias)
    before, after = norms_around_mlp(config, "pre_mlp_layernorm.weight")
    if given(config.moe).moe_post_norm:
        output = names.loaded(names.post_norm) if config.extra.get("fused_experts") else names.post_norm
        after = [inner("mlp.post_layernorm.weight", output)]
    rules = [*before, inner("mlp.router.weight", weight)]
    if given(config.moe).moe_router_enable_expert_bias:
        rules.append(inner("mlp.router.expert_bias", bias, hf_layout=names.bias_layout, keep_fp32=True))
    return [*rules, *after]


def experts(config: McaModelConfig, names: MoeNames) -> list[Param]:
    """One expert's two matrices, from its own HF tensors or from the stacked ones."""
    parts, shard = (("gate_", "up_"), GATED) if config.mlp.gated_linear_unit else (("up_",), COLUMN)
    fc1, fc2 = f"{MLP}experts.linear_fc1.weight{{expert}}", f"{MLP}experts.linear_fc2.weight{{expert}}"
    if config.extra.get("fused_experts"):
        first = "".join(parts)
        turned: Layout = Transposed() if config.extra.get(TRANSPOSED) else SEPARATE
        return [
            Param(mca=fc1, hf=(f"{HF}{FUSED}{first}proj",), hf_layout=turned, shard=shard, stacked=True),
            Param(mca=fc2, hf=(f"{HF}{FUSED}down_proj",), hf_layout=turned, shard=ROW, stacked=True),
        ]
    own = f"{HF}{names.experts}{{expert}}."
    files = tuple(own + {"gate_": names.gate, "up_": names.up}[part] for part in parts)
    return [
        Param(mca=fc1, hf=files, layout=Concat((1,) * len(parts)), shard=shard),
        Param(mca=fc2, hf=(own + names.down,), shard=ROW),
    ]


def shared_experts(config: McaModelConfig, names: MoeNames) -> list[Param]:
    """The expert that every token passes, and the gate on it."""
    if not given(config.moe).moe_shared_expert_intermediate_size:
        return []
    mca = f"{MLP}shared_experts."
    hf = HF + (names.loaded(names.shared) if config.extra.get("fused_experts") else names.shared)
    first = gate_up if config.mlp.gated_linear_unit else up
    rules = [first(mca, hf), down(mca, hf)]
    if given(config.moe).moe_shared_expert_gate:
        rules.append(Param(mca=f"{mca}gate_weight", hf=(HF + names.shared_gate,)))
    return rules


def moe_params(
    config: McaModelConfig, names: MoeNames, attention_rules: Sequence[Param] | None = None
) -> list[Param]:
    """Every parameter of a model of attention, ``mlp_layers`` and MTP layers, in checkpoint order.

    Args:
        config: The model.
        names: What HF files call the inside of an expert layer.
        attention_rules: One layer's attention with its norms; None: from ``attention``.
    """
    rules = attention(config) if attention_rules is None else attention_rules
    layers = in_layers(config, attention if attention_rules is None else lambda own: rules)
    mtp = mtp_params(config, last_layer(config, names, rules)) if config.mtp_num_layers else []
    return [embedding(), *layers, *mlp_layers(config, names), *mtp, *head(config)]


def mlp_layers(config: McaModelConfig, names: MoeNames) -> Iterator[Param]:
    """The MLP of every decoder layer, dense or with experts."""
    layers = range(config.num_layers)
    sparse = [layer for layer in layers if config.is_moe_layer(layer)]
    yield from expand_rules(
        dense_mlp(config), layers=[layer for layer in layers if not config.is_moe_layer(layer)]
    )
    if sparse:
        yield from moe_layers(config, names, sparse)


def moe_layers(config: McaModelConfig, names: MoeNames, layers: Sequence[int]) -> Iterator[Param]:
    """The expert layers ``layers``."""
    projections = [inner(name, name) for name in LATENT] if given(config.moe).moe_latent_size else []
    yield from expand_rules(
        [*router(config, names), *projections, *shared_experts(config, names)], layers=layers
    )
    yield from expand_rules(experts(config, names), layers=layers, experts=range(config.num_experts))


def last_layer(config: McaModelConfig, names: MoeNames, attention: Sequence[Param]) -> list[Param]:
    """The rules of one decoder layer as an MTP layer holds it: with experts if the model has any."""
    if not config.num_experts:
        return [*attention, *dense_mlp(config)]
    stacked = config.extra.get("fused_mtp_experts", config.extra.get("fused_experts"))
    config = replace(config, extra={**config.extra, "fused_experts": stacked})
    each_expert = range(config.num_experts)
    own = [replace(rule, expert=expert) for expert in each_expert for rule in experts(config, names)]
    return [*attention, *router(config, names), *shared_experts(config, names), *own]


def detect_stacked_experts(
    config: McaModelConfig, names: Collection[str], shapes: Mapping[str, Shape]
) -> Values:
    """Detect stacked experts under the names of transformers' modules (5.x); see ``Family.detect_extra``."""
    return {"fused_experts": True} if any(name.endswith("experts.gate_up_proj") for name in names) else {}


def expert_fields(
    *, count: str, default: int | None = None, ffn: str = "moe_intermediate_size"
) -> tuple[Field, ...]:
    """Return the fields of the number, width and top-k of experts.

    Args:
        count: HF's key of their number.
        default: Their number where there is neither that key nor ``num_local_experts``.
        ffn: HF's key of their width.
    """
    return (
        Field("num_moe_experts", count, lambda hf: hf.get("num_local_experts", default)),
        Field("moe_ffn_hidden_size", ffn),
        Field("moe_router_topk", "num_experts_per_tok"),
    )


def fuse_shared_experts(
    hf: HfConfig, key: str, default: int, ffn: str = "moe_intermediate_size"
) -> JsonObject:
    """The experts that every token passes, as one that is so many times as wide.

    Args:
        hf: ``config.json``.
        key: HF's key of their number.
        default: Their number where there is no such key.
        ffn: HF's key of the width of one.
    """
    return {"moe_shared_expert_intermediate_size": hf[ffn] * (hf.get(key, default) or 0) or None}


def write_shared_experts(values: Values, key: str) -> HfConfig:
    """Write the HF keys."""
    return {key: (values["moe_shared_expert_intermediate_size"] or 0) // (values["moe_ffn_hidden_size"] or 1)}


def derive_moe_layers(hf: HfConfig) -> dict[str, object]:
    """Derive the layers with experts: as listed, or all from ``first_k_dense_replace`` on."""
    layers, dense = range(hf["num_hidden_layers"]), hf.get("first_k_dense_replace", 1)
    kinds = hf.get("mlp_layer_types") or ["sparse" if layer >= dense else "dense" for layer in layers]
    return {"moe_layer_freq": tuple(int(kind == "sparse") for kind in kinds)}


def write_moe_layers(values: Values) -> HfConfig:
    """Write the HF keys."""
    layers = range(values["num_layers"])
    return {"mlp_layer_types": ["sparse" if is_moe_layer(values, layer) else "dense" for layer in layers]}


def write_aux_loss(values: Values) -> HfConfig:
    """Write the HF keys."""
    on = values["moe_router_load_balancing_type"] != "none"
    return {"output_router_logits": on, "router_aux_loss_coef": values["moe_aux_loss_coeff"]}


def aux_loss(hf: HfConfig) -> dict[str, object]:
    """The load-balancing loss, which HF models add only with ``output_router_logits``.

    Most HF models take 0.001 for an absent coefficient; ``defaults`` of a table say what others take.
    """
    on = hf.get("output_router_logits", False)
    return {
        "moe_aux_loss_coeff": float(hf.get("router_aux_loss_coef", 0.001)) if on else 0.0,
        "moe_router_load_balancing_type": "aux_loss" if on else "none",
    }


SCALED = Field("moe_router_topk_scaling_factor", "routed_scaling_factor", 1.0)


NORMALISED = Fixed("norm_topk_prob", (True,), "Megatron normalizes sigmoid scores over the chosen experts")


def sigmoid_experts(hf: HfConfig) -> JsonObject:
    """``grouped_experts``, chosen by sigmoid scores."""
    require_sigmoid_routing(hf)
    return grouped_experts(hf)


def grouped_experts(hf: HfConfig) -> JsonObject:
    """Dense first layers, shared experts as one wide one, and group-limited routing."""
    layers, dense = hf["num_hidden_layers"], hf.get("first_k_dense_replace") or 0
    groups = hf.get("n_group") or 1
    return {
        "moe_layer_freq": tuple(int(layer >= dense) for layer in range(layers)),
        **fuse_shared_experts(hf, "n_shared_experts", 0),
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": (hf.get("topk_group") or 1) if groups > 1 else None,
        "mtp_num_layers": hf.get("num_nextn_predict_layers") or 0,
    }


def write_groups(values: Values) -> HfConfig:
    """Write the HF keys."""
    dense = [layer for layer in range(values["num_layers"]) if not is_moe_layer(values, layer)]
    return {
        "first_k_dense_replace": len(dense),
        **write_shared_experts(values, "n_shared_experts"),
        "n_group": values["moe_router_num_groups"] or 1,
        "topk_group": values["moe_router_group_topk"] or 1,
        "num_nextn_predict_layers": values["mtp_num_layers"],
    }


SHARED_WIDTH = Field("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size")


def sparse_layers(hf: HfConfig) -> dict[str, object]:
    """Derive the layers with experts, and the router weights of the chosen ones."""
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    freq = tuple(int(i not in dense and (i + 1) % step == 0) for i in range(hf["num_hidden_layers"]))
    # weights normalized over the chosen experts are a softmax after the choice
    pre_softmax = not hf.get("norm_topk_prob", False)
    return {"moe_layer_freq": freq, "moe_router_pre_softmax": pre_softmax} | aux_loss(hf)


def write_sparse(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(values["num_layers"]) if not is_moe_layer(values, i)],
        "norm_topk_prob": not values["moe_router_pre_softmax"],
        **write_aux_loss(values),
        **write_window(values),
    }


def listed_moe_layers(dense: int) -> Lens:
    """Return the lens of ``mlp_layer_types``; without it all layers but the first ``dense`` have experts."""
    return Lens(lambda hf: derive_moe_layers({**hf, "first_k_dense_replace": dense}), write_moe_layers)


def _check_sigmoid_routing(hf: HfConfig) -> JsonObject:
    require_sigmoid_routing(hf)
    return {}


SIGMOID_ROUTING = Lens(_check_sigmoid_routing)
"""Reject what Megatron's sigmoid routing computes otherwise."""
AUX_LOSS = Lens(aux_loss, write_aux_loss)
MOE_LAYERS = Lens(derive_moe_layers, write_moe_layers)
SPARSE_LAYERS = Lens(sparse_layers, write_sparse)
GROUPED_EXPERTS = Lens(sigmoid_experts, write_groups)
