"""Options without effect in a run, and router settings that train another model than ``config.json`` describes.

`warn` logs them. ``docs/reference/key_rules.md`` lists the options without effect; options that can never have one
raise an error when the arguments are built.
"""

import dataclasses
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_models.megatron import platform
from mca_models.megatron.distributed.collectives import all_gather
from mca_models.megatron.features.routers import has_biased_softmax
from mca_train.losses.moe_aux import routers
from mca_train.types import VirtualModels

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from mca_config.training import TrainingArguments

logger = logging.getLogger(__name__)

_ROUTER_BIAS = ("moe_router_bias_update_rate",)

_PIPELINE = (
    "overlap_p2p_comm",
    "batch_p2p_comm",
    "variable_seq_lengths",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "batch_p2p_sync",
    "deallocate_pipeline_outputs",
)

_BALANCE = ("moe_aux_loss_coeff",)
_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss")
_ALWAYS_ON = ("attention_softmax_in_fp32",)
_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")
_VOCABULARY = ("decoupled_lr", "decoupled_min_lr")
_WITHOUT_WARM_UP = ("constant", "reduce_lr_on_plateau", "greedy")
_WITHOUT_END = ("constant", "constant_with_warmup")
_EXPERT_MODULES = ("moe", "moe_act", "shared_experts")
_GPU = ("pin_cpu_grads", "pin_cpu_params", "overlap_cpu_optimizer_d2h_h2d", "deterministic_mode")
_FORCED = ("moe_router_force_load_balancing", "moe_router_force_biased")


def warn_unused_options(
    args: "TrainingArguments",
    config: McaModelConfig,
    megatron: "TransformerConfig",
    *,
    trains_vocabulary: bool = True,
    trains_routers: bool = True,
) -> None:
    """Warn about options of ``args`` without effect; the two flags say whether any rank trains such weights."""
    unused: dict[str, list[str]] = {}
    for why, names in _groups(args, config, megatron):
        unused[why] = [name for name in names if _is_set(args, name)]
    if not trains_vocabulary:
        unused["embedding and output layer are not trained"] = [
            name for name in _VOCABULARY if _is_set(args, name)
        ]
    if not trains_routers and megatron.moe_router_enable_expert_bias and megatron.moe_router_bias_update_rate:
        why = "routers are frozen, including expert biases"
        unused[why] = [name for name in _ROUTER_BIAS if _is_set(args, name)]
    for why, values in _values(args, config, megatron):
        unused.setdefault(why, []).extend(values)
    unused = {why: names for why, names in unused.items() if names}
    if unused:
        options = "; ".join(f"{', '.join(names)} ({why})" for why, names in unused.items())
        logger.warning("without effect in this run: %s", options)


def unused_option_names(
    args: "TrainingArguments", config: McaModelConfig, megatron: "TransformerConfig"
) -> frozenset[str]:
    """Return arguments without effect with a model of ``megatron``, with any value."""
    return frozenset(name for _, names in _groups(args, config, megatron) for name in names)


def _trains_vocabulary(model: VirtualModels) -> bool:
    """Return True if any rank trains the embedding, the output layer, or adapter rows of them; collective."""
    mine = any(item.param.vocab and tensor.requires_grad for item, tensor in model.local_params())
    return any(all_gather(mine))


def _trains_routers(model: VirtualModels) -> bool:
    """Return True if any rank trains a router with expert biases; collective if routers have them."""
    if not model.megatron.moe_router_enable_expert_bias:
        return False
    return any(all_gather(any(router.weight.requires_grad for router in routers(model.chunks))))


def _is_set(args: "TrainingArguments", name: str) -> bool:
    """Return True if ``name`` is set, and not to what is done anyway."""
    value = getattr(args, name, None)
    if value is None:
        value = args.transformer_config_overrides().get(name)
    return value is not None and value is not (name in _ALWAYS_ON)


def _groups(
    args: "TrainingArguments", config: McaModelConfig, megatron: "TransformerConfig"
) -> Iterator[tuple[str, tuple[str, ...]]]:
    layout = config.layout
    if config.moe is None:
        options = dict.fromkeys((*vars(args), *args.transformer_config_overrides()))
        names = [name for name in options if name.startswith("moe_")]
        etp = ["expert_tensor_parallel_size"] if layout.etp != layout.tp else []
        yield "the model has no experts", (*names, *etp)
    else:
        yield from _experts(config, megatron)
        if args.moe_router_bias_update_rate and not megatron.moe_router_bias_update_rate:
            yield "an adapter, or freeze, keeps expert biases fixed", _ROUTER_BIAS
    if not megatron.mtp_num_layers:
        yield "no MTP layers", ("mtp_loss_scaling_factor", "mtp_detach_heads")
    if layout.vpp == 1:
        yield "no virtual pipeline stages", ("microbatch_group_size_per_vp_stage",)
    if layout.pp == 1:
        yield "one pipeline stage", _PIPELINE
    if layout.cp == 1:
        yield "one context rank", ("cp_comm_type",)
    if layout.tp == 1:
        yield "one tensor rank", ("distribute_saved_activations",)
    if not megatron.sequence_parallel:
        yield "no sequence parallelism", ("clone_scatter_output_in_embedding",)
    yield from _machine(args, megatron)


def _values(
    args: "TrainingArguments", config: McaModelConfig, megatron: "TransformerConfig"
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield reasons and options, with their values, that another argument or the model disables."""
    schedule = args.lr_scheduler_type.value
    if args.warmup_steps and schedule in _WITHOUT_WARM_UP:
        yield f"lr_scheduler_type {schedule} has no warm-up", ("warmup_steps",)
    if schedule in _WITHOUT_END:
        ends = tuple(name for name in ("min_lr", "decoupled_min_lr") if getattr(args, name))
        yield f"lr_scheduler_type {schedule} has no end value", ends
    if args.optimizer == "sgd":
        defaults = {field.name: field.default for field in dataclasses.fields(args)}
        yield "the optimizer is sgd", tuple(n for n in _ADAM if getattr(args, n) != defaults[n])
    modules = args.recompute_modules or ()
    if config.moe is None:
        expert_modules = [name for name in modules if name in _EXPERT_MODULES]
        yield "the model has no experts", tuple(f"recompute_modules {name}" for name in expert_modules)
    elif not config.moe.moe_shared_expert_intermediate_size and "shared_experts" in modules:
        yield "the model has no shared experts", ("recompute_modules shared_experts",)
    if config.moe is not None and args.moe_aux_loss_coeff is None:
        kind = args.moe_router_load_balancing_type
        if kind in _BALANCING and not megatron.moe_aux_loss_coeff:
            why = "config.json has no such loss, so its coefficient is 0; set moe_aux_loss_coeff"
            yield why, (f"moe_router_load_balancing_type {kind}",)


def _experts(config: McaModelConfig, megatron: "TransformerConfig") -> Iterator[tuple[str, tuple[str, ...]]]:
    if not megatron.moe_router_enable_expert_bias:
        yield "the router has no expert bias", _ROUTER_BIAS
    if "none" in megatron.moe_router_load_balancing_type:
        yield "moe_router_load_balancing_type is none", _BALANCE
    if not given(config.moe).moe_shared_expert_intermediate_size:
        yield "the model has no shared experts", ("moe_shared_expert_overlap",)


def _machine(
    args: "TrainingArguments", megatron: "TransformerConfig"
) -> Iterator[tuple[str, tuple[str, ...]]]:
    if megatron.transformer_impl == "local":
        yield "the local layers always do this", ("attention_softmax_in_fp32",)
    if not (megatron.bf16 or megatron.fp16):
        yield "gradients of fp32 weights are fp32", ("accumulate_allreduce_grads_in_fp32",)
    if platform.device_type() == "cpu":
        yield "there is no GPU", _GPU


def warn_router_bias_step(
    args: "TrainingArguments", config: McaModelConfig, megatron: "TransformerConfig", *, trained: bool = True
) -> None:
    """Warn if Megatron's default step for trained expert biases is large compared to softmax router scores."""
    rate = megatron.moe_router_bias_update_rate
    if trained and args.moe_router_bias_update_rate is None and rate and has_biased_softmax(config):
        logger.warning(
            "moe_router_bias_update_rate is %g (Megatron's default), and the mean probability of one of %d "
            "experts is %.2g; set moe_router_bias_update_rate; 0 keeps the checkpoint's biases as transformers does",
            rate,
            given(config.moe).num_router_choices,
            1 / given(config.moe).num_router_choices,
        )


def warn_forced_routing(config: McaModelConfig, megatron: "TransformerConfig") -> None:
    """Warn that a benchmark setting of Megatron's replaces the router's choice."""
    names = [name for name in _FORCED if getattr(megatron, name, None)]
    if names and config.moe is not None:
        logger.warning(
            "%s: experts are chosen at random, in evaluation and log-probabilities too, so losses are not the "
            "model's; use it only to measure speed",
            ", ".join(names),
        )


def warn(model: VirtualModels, args: "TrainingArguments") -> None:
    """Log options without effect, and router settings that train another model than ``config.json`` describes."""
    config, megatron = model.config, model.megatron
    vocabulary_moves = args.decoupled_lr is None or _trains_vocabulary(model)
    routers_move = _trains_routers(model)  # both are collective
    warn_unused_options(
        args, config, megatron, trains_vocabulary=vocabulary_moves, trains_routers=routers_move
    )
    warn_router_bias_step(args, config, megatron, trained=routers_move)
    warn_forced_routing(config, megatron)
