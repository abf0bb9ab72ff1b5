"""Mixture of experts: settings, what Megatron cannot compute of experts and routers, latent MoE, post-norms."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mca_config.model.moe import Moe
from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import Values
from mca_models.megatron.features.feature import Context, Feature, Setup
from mca_models.megatron.features.mlp import has_altered_glu
from mca_models.megatron.features.norms import add_post_norm
from mca_models.megatron.features.routers import has_custom_groups
from mca_models.megatron.layers.sharded import ReplicatedLinear
from mca_models.megatron.types import GptModel, MegatronConfig, MegatronModule, Settings, Upstream, WithBias

_SAME_NAME = (
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_apply_probs_on_input",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_aux_loss_coeff",
    "moe_router_load_balancing_type",
)


def aux_loss_coefficient(config: McaModelConfig) -> float:
    """Convert HF's coefficient of the load-balancing loss to Megatron's.

    With balanced experts HF's loss over all layers is ``topk``, Megatron's is 1 per layer.
    """
    if config.moe is None:
        return 0.0
    layers = sum(config.is_moe_layer(layer) for layer in range(config.num_layers))
    return config.moe.moe_aux_loss_coeff * config.moe.moe_router_topk / max(layers, 1)


def _settings(config: McaModelConfig) -> Settings:
    moe = given(config.moe)
    return {name: getattr(moe, name) for name in _SAME_NAME} | {
        "moe_layer_freq": [int(config.is_moe_layer(layer)) for layer in range(config.num_layers)],
        "moe_aux_loss_coeff": aux_loss_coefficient(config),
        "moe_router_dtype": "fp32",
    }


def _problems(setup: Setup) -> Iterator[str]:
    config, settings = setup.config, setup.settings
    moe = given(config.moe)
    if settings.get("moe_apply_probs_on_input") and settings.get("moe_router_topk") != 1:
        yield "moe_apply_probs_on_input needs num_experts_per_tok 1; remove it"
    if settings.get("moe_shared_expert_overlap") and has_altered_glu(config):
        yield (
            "shared experts that overlap omit what the model adds to or clamps in its gated MLPs; remove "
            "moe_shared_expert_overlap"
        )
    if settings.get("moe_router_fusion") and setup.custom_router:
        yield (
            f"the fused router chooses other experts than {config.model_type}{_group_sizes(config)}; remove "
            "moe_router_fusion"
        )
    if settings.get("moe_router_load_balancing_type") == "sinkhorn":
        yield from _sinkhorn(setup, moe)
    if (settings.get("mlp_chunks_for_training") or 1) > 1:
        yield (
            "mlp_chunks_for_training balances experts by the tokens of a chunk, padding among them; remove it for a "
            "model with experts"
        )
    yield from _capacity(moe, settings)


def _group_sizes(config: McaModelConfig) -> str:
    moe = given(config.moe)
    if not has_custom_groups(config):
        return ""
    return f" with num_experts_per_tok {moe.moe_router_topk} and topk_group {moe.moe_router_group_topk}"


def _capacity(moe: Moe, settings: Values) -> Iterator[str]:
    share = moe.moe_router_topk / moe.num_moe_experts
    if (
        settings.get("moe_pad_expert_input_to_capacity")
        and settings["moe_expert_capacity_factor"] * share > 1
    ):
        yield (
            "megatron-core cannot pad experts to a capacity above the number of all tokens, and "
            f"moe_expert_capacity_factor {settings['moe_expert_capacity_factor']} exceeds it; lower it to "
            f"{1 / share:g}, or remove moe_pad_expert_input_to_capacity"
        )


def _sinkhorn(setup: Setup, moe: Moe) -> Iterator[str]:
    """Yield limits of Megatron's Sinkhorn weights: softmax over all experts, sigmoid for topk 1, also in evaluation."""
    if setup.settings.get("moe_aux_loss_coeff"):
        yield "moe_router_load_balancing_type sinkhorn has no auxiliary loss; set moe_aux_loss_coeff to 0"
    score, single = moe.moe_router_score_function, moe.moe_router_topk == 1
    alike = score == "sigmoid" if single else score == "softmax" and moe.moe_router_pre_softmax
    changed = moe.moe_router_enable_expert_bias or moe.moe_router_topk_scaling_factor or setup.custom_router
    if not alike or changed or moe.moe_router_num_groups:
        yield (
            "moe_router_load_balancing_type sinkhorn weighs experts by their chances among all, in evaluation too, "
            f"and {setup.config.model_type} otherwise; set it to aux_loss or none"
        )


def fix_expert_biases(model: GptModel) -> None:
    """Fix experts with output biases, one module per expert.

    Megatron adds the bias in place to a view, which autograd rejects: the output of each last projection is copied
    first. It also marks the bias for the gradient sum of sequence parallelism, over tensor ranks with other experts.
    """
    for layer in model.decoder.layers:
        for expert in getattr(getattr(layer.mlp, "experts", None), "local_experts", ()):
            expert.linear_fc2.register_forward_hook(_copied)
            expert.linear_fc2.bias.sequence_parallel = False


def _copied(linear: MegatronModule, args: tuple[object, ...], output: WithBias) -> WithBias:
    value, bias = output
    return value.clone(), bias


MOE = Feature(
    name="experts",
    enabled=lambda config: config.moe is not None,
    settings=_settings,
    sequence_parallel="trained",
    problems=_problems,
)
BIASED_EXPERTS = Feature(
    name="experts with biases",
    enabled=lambda config: config.moe is not None and config.mlp.add_bias_linear,
    settings=lambda config: {"bias_dropout_fusion": False},  # grouped experts reject it
    finish=lambda model, config: fix_expert_biases(model),
)


@contextmanager
def latent_projections(context: Context, megatron: MegatronConfig) -> Iterator[None]:
    """Make Megatron build local MoE layers with latent projections, in this block."""
    from megatron.core.transformer.moe import moe_layer

    if context.implementation == "transformer_engine":
        yield
        return
    module: Upstream = sys.modules[moe_layer.__name__]
    names = {"HAVE_TE": True, "TELinear": ReplicatedLinear}
    before = {name: getattr(module, name) for name in names if hasattr(module, name)}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name in names:
            delattr(module, name)
        for name, value in before.items():
            setattr(module, name, value)


def _latent_problems(setup: Setup) -> Iterator[str]:
    if setup.settings.get("moe_shared_expert_overlap"):
        yield "moe_shared_expert_overlap is not supported with moe_latent_size; remove moe_shared_expert_overlap"


LATENT_MOE = Feature(
    name="latent MoE",
    enabled=lambda config: config.moe is not None and config.moe.moe_latent_size is not None,
    settings=lambda config: {"moe_latent_size": given(config.moe).moe_latent_size},
    problems=_latent_problems,
    prepare=latent_projections,
)


def _add_post_norms(model: GptModel, config: McaModelConfig) -> None:
    for layer in model.decoder.layers:
        if config.is_moe_layer(layer.layer_number - 1):
            add_post_norm(layer.mlp, model.config)


MOE_POST_NORM = Feature(
    name="norm after MoE layers",
    enabled=lambda config: config.moe is not None and config.moe.moe_post_norm,
    finish=_add_post_norms,
)
