"""Options that change nothing in a run of this model, on these ranks, on this machine, are reported here in one line.

`docs/configuration.md` lists them. Nothing is refused here: what could never be followed is refused when the arguments
are made.
"""

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mca_config.model_config import McaModelConfig

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from mca_config.training import TrainingArguments

logger = logging.getLogger(__name__)

_OF_ROUTERS_BIAS = ("moe_router_bias_update_rate",)

_OF_PIPELINES = (
    "overlap_p2p_comm",
    "batch_p2p_comm",
    "variable_seq_lengths",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)

_OF_BALANCE = ("moe_aux_loss_coeff",)
_ALWAYS_ON = ("attention_softmax_in_fp32",)
_OF_DEVICES = ("pin_cpu_grads", "pin_cpu_params", "overlap_cpu_optimizer_d2h_h2d", "deterministic_mode")


def tell_without_effect(
    args: "TrainingArguments", config: McaModelConfig, megatron: "TransformerConfig"
) -> None:
    """Logs what of ``args`` does nothing here.

    Args:
        args: Training arguments.
        config: The model, with the layout it stands on.
        megatron: Megatron's configuration of it.
    """
    found: dict[str, list[str]] = {}
    for why, names in _groups(args, config, megatron):
        given = [name for name in names if _given(args, name)]
        if given:
            found[why] = given
    if found:
        told = "; ".join(f"{', '.join(names)} ({why})" for why, names in found.items())
        logger.warning("without effect in this run: %s", told)


def _given(args: "TrainingArguments", name: str) -> bool:
    """Whether ``name`` was asked for: not left out, and not what is done anyway."""
    value = getattr(args, name, None)
    return value is not None and value is not (name in _ALWAYS_ON)


def _groups(
    args: "TrainingArguments", config: McaModelConfig, megatron: "TransformerConfig"
) -> Iterator[tuple[str, tuple[str, ...]]]:
    layout = config.layout
    if config.num_moe_experts is None:
        names = [name for name in vars(args) if name.startswith("moe_")]
        cut = ["expert_tensor_parallel_size"] if layout.etp != layout.tp else []
        yield "the model has no experts", (*names, *cut)
    else:
        yield from _experts(config, megatron)
    if not megatron.mtp_num_layers:
        yield "no prediction layers", ("mtp_loss_scaling_factor",)
    if layout.vpp == 1:
        yield "no virtual pipeline stages", ("microbatch_group_size_per_vp_stage",)
    if layout.pp == 1:
        yield "one pipeline stage", _OF_PIPELINES
    if layout.cp == 1:
        yield "one context rank", ("cp_comm_type",)
    if layout.tp == 1:
        yield "one tensor rank", ("distribute_saved_activations",)
    yield from _machine(args, megatron)


def _experts(config: McaModelConfig, megatron: "TransformerConfig") -> Iterator[tuple[str, tuple[str, ...]]]:
    if not megatron.moe_router_enable_expert_bias:
        yield "the router has no expert bias", _OF_ROUTERS_BIAS
    if "none" in megatron.moe_router_load_balancing_type:
        yield "moe_router_load_balancing_type is none", _OF_BALANCE
    if not config.moe_shared_expert_intermediate_size:
        yield "the model has no shared experts", ("moe_shared_expert_overlap",)


def _machine(
    args: "TrainingArguments", megatron: "TransformerConfig"
) -> Iterator[tuple[str, tuple[str, ...]]]:
    from mca_models.megatron import platform

    if megatron.transformer_impl == "local":
        yield "the local layers' attention is always so", ("attention_softmax_in_fp32",)
    if not (megatron.bf16 or megatron.fp16):
        yield "gradients of fp32 weights are fp32", ("accumulate_allreduce_grads_in_fp32",)
    if platform.device_type() == "cpu":
        yield "there is no GPU", _OF_DEVICES
