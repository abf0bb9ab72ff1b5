"""Limits: what the installed megatron-core, or this machine, computes wrongly or not at all.

Each was measured by comparing losses and gradients over layouts, and has a test.
"""

import math
from collections.abc import Iterator

from mca_config.arguments import transformer_engine_problems
from mca_config.errors import raise_problems
from mca_config.layout import ParallelLayout
from mca_config.model.moe import Moe
from mca_config.model_config import McaModelConfig
from mca_config.pipeline import PipelinePlan, pipeline_plan
from mca_config.printable import counted
from mca_config.types import Values
from mca_models.megatron.factory.execution import waits_for_sends
from mca_models.megatron.factory.fused_limits import FIXED_IN_0_17, Version, fused_problems, has_altered_glu
from mca_models.megatron.features.core_attention import custom_core_attention
from mca_models.megatron.features.group_router import has_custom_groups
from mca_models.megatron.features.spec import has_custom_router


def require_supported(
    config: McaModelConfig,
    layout: ParallelLayout,
    settings: Values,
    *,
    device: str,
    version: Version,
    implementation: str,
    engine: Version | None,
    packed: bool = False,
) -> None:
    """Raise one error with everything that cannot run.

    Args:
        config: The model.
        layout: The parallel sizes.
        settings: Arguments of Megatron's ``TransformerConfig``.
        device: ``cpu`` or ``cuda``.
        version: Version of megatron-core.
        implementation: ``local`` or ``transformer_engine``.
        engine: Version of Transformer Engine; None: not installed.
        packed: Whether rows have several sequences.
    """
    problems = [
        *_pipeline(config, layout, settings),
        *_sends(layout, settings, device, version),
        *_mla_gradients(config, layout, settings),
        *_recomputation(config, layout, settings, version),
        *_machine(settings, device, implementation),
        *_routing(config, settings),
        *_attention(config, layout, settings, implementation),
        *(packed_problems(config, layout, settings, implementation, engine) if packed else ()),
        *fused_problems(config, settings, version, engine),
    ]
    raise_problems(problems, f"{config.model_type} at {layout}")


def _pipeline(config: McaModelConfig, layout: ParallelLayout, settings: Values) -> Iterator[str]:
    middle = range(1, layout.pp - 1)
    if (
        layout.vpp > 1
        and config.head.tie_word_embeddings
        and {*middle} & {*_plan(config, layout).embedding_ranks}
    ):
        yield (
            "megatron-core cannot tie the embedding to MTP layers on a pipeline rank between the first and the last "
            "with virtual stages; move m of pipeline_model_parallel_layout into the stage of L"
        )
    overlaps, batched = settings.get("overlap_p2p_comm"), settings.get("batch_p2p_comm")
    if layout.pp > 1 and layout.vpp == 1 and overlaps:
        yield (
            "overlap_p2p_comm needs virtual_pipeline_model_parallel_size of at least 2: Megatron's plain schedule "
            "has nothing to overlap with; remove overlap_p2p_comm"
        )
    if layout.vpp > 1 and (not overlaps or batched):
        yield (
            "virtual pipelining computes wrong numbers without overlap_p2p_comm; remove overlap_p2p_comm and "
            "batch_p2p_comm from the arguments"
        )


def _sends(layout: ParallelLayout, settings: Values, device: str, version: Version) -> Iterator[str]:
    if not settings.get("deallocate_pipeline_outputs"):
        return
    if device == "cpu":
        yield (
            "deallocate_pipeline_outputs frees what gloo still sends, which changes the numbers silently; remove it"
        )
    elif not waits_for_sends(layout, version):
        yield (
            "deallocate_pipeline_outputs frees what virtual stages still send before megatron-core 0.18, which changes "
            "the numbers silently; remove it"
        )


def _plan(config: McaModelConfig, layout: ParallelLayout) -> PipelinePlan:
    return pipeline_plan(layout, config.num_layers, config.mtp_num_layers)


def _mla_gradients(config: McaModelConfig, layout: ParallelLayout, settings: Values) -> Iterator[str]:
    """Yield the limit of MLA with tensor parallelism but without sequence parallelism.

    On the local layers Megatron sums full gradients of the query norm once per tensor rank. With Transformer Engine the
    gradient of the rotary key that all heads share is not summed over tensor ranks.
    """
    if config.mla is not None and layout.tp > 1 and not settings.get("sequence_parallel"):
        yield (
            "megatron-core computes wrong gradients of MLA with tensor_model_parallel_size above 1 and no "
            "sequence_parallel; set sequence_parallel to true"
        )


def _recomputation(
    config: McaModelConfig, layout: ParallelLayout, settings: Values, version: Version
) -> Iterator[str]:
    """Yield limits of activation recomputation."""
    yield from _selective(config, settings)
    count = settings.get("recompute_num_layers") or 1
    if settings.get("recompute_method") != "uniform" or count == 1:
        return
    if settings.get("mtp_num_layers"):
        yield (
            f"megatron-core cannot recompute MTP layers {count} layers at a time; change recompute_num_layers "
            "to 1, or use recompute_method block"
        )
    if version >= FIXED_IN_0_17:
        return
    layers = [len(chunk.layers) for chunk in pipeline_plan(layout, config.num_layers, config.mtp_num_layers)]
    uneven = [number for number in layers if number % count]
    if uneven:
        yield (
            f"megatron-core 0.16 cannot recompute the {counted(max(uneven), 'layer')} of a pipeline stage {count} at a "
            "time; change recompute_num_layers to 1, or use recompute_method block"
        )


def _selective(config: McaModelConfig, settings: Values) -> Iterator[str]:
    """Yield modules that cannot be recomputed alone, because they read inputs that are gone by then."""
    if settings.get("recompute_granularity") != "selective":
        return
    modules = settings.get("recompute_modules") or ["core_attn"]
    indexed = config.mla is not None and config.dsa is not None
    if "core_attn" in modules and (indexed or config.block_sparse_attention is not None):
        yield (
            "top-k attention cannot be recomputed alone; remove core_attn from "
            "recompute_modules, or set recompute_granularity to full"
        )
    if "mlp" in modules and (settings.get("mlp_chunks_for_training") or 1) > 1:
        yield (
            "recomputed MLPs are not split into chunks; remove mlp from recompute_modules, or "
            "mlp_chunks_for_training"
        )
    if "layernorm" in modules and (config.block.parallel_block != "none" or _has_shortcut(config)):
        yield (
            "norms cannot be recomputed alone if attention and MLP, or MLP and experts, are parallel; "
            "remove layernorm from recompute_modules, or set recompute_granularity to full"
        )


_CUDA_ONLY = ("gradient_accumulation_fusion", "fp8", "tp_comm_overlap", "masked_softmax_fusion")


def _machine(settings: Values, device: str, implementation: str) -> Iterator[str]:
    if device != "cuda":
        yield from (f"{name} needs CUDA; remove it" for name in _CUDA_ONLY if settings.get(name))
        if settings.get("moe_token_dispatcher_type") == "flex":
            yield "moe_token_dispatcher_type flex needs CUDA; use alltoall or allgather"
        settings = {name: value for name, value in settings.items() if name not in _CUDA_ONLY}
    elif settings.get("tp_comm_overlap"):
        yield "tp_comm_overlap needs buffers that mca does not create (Transformer Engine's initialize_ub); remove it"
    if settings.get("fp8_param"):
        yield "fp8_param is not supported: gradient buffers and optimizer do not support weights in fp8; remove it"
    if implementation == "local":
        yield from transformer_engine_problems(settings)


def _has_shortcut(config: McaModelConfig) -> bool:
    return config.moe is not None and config.moe.moe_shortcut


def _routing(config: McaModelConfig, settings: Values) -> Iterator[str]:
    if config.moe is None:
        return
    if settings.get("moe_apply_probs_on_input") and settings.get("moe_router_topk") != 1:
        yield "moe_apply_probs_on_input needs num_experts_per_tok 1; remove it"
    if settings.get("moe_shared_expert_overlap") and config.moe.moe_latent_size:
        yield "moe_shared_expert_overlap is not supported with moe_latent_size; remove moe_shared_expert_overlap"
    if settings.get("moe_shared_expert_overlap") and has_altered_glu(config):
        yield (
            "shared experts that overlap omit what the model adds to or clamps in its gated MLPs; remove "
            "moe_shared_expert_overlap"
        )
    if settings.get("moe_router_fusion") and has_custom_router(config):
        topk, groups = config.moe.moe_router_topk, config.moe.moe_router_group_topk
        sizes = (
            f" with num_experts_per_tok {topk} and topk_group {groups}" if has_custom_groups(config) else ""
        )
        yield f"the fused router chooses other experts than {config.model_type}{sizes}; remove moe_router_fusion"
    if settings.get("moe_shared_expert_overlap") and (
        config.moe.experts_beside_mlp or config.moe.moe_shortcut
    ):
        yield (
            "moe_shared_expert_overlap skips the norms of an MLP parallel to experts, or adds both outputs at once; "
            "remove moe_shared_expert_overlap"
        )
    if config.moe.experts_beside_mlp and settings.get("moe_token_dispatcher_type") == "flex":
        yield (
            "moe_token_dispatcher_type flex sends tokens to the experts of their largest weights, and this model's "
            "may be negative; use alltoall or allgather"
        )
    yield from _identity_experts(config.moe, settings)
    if settings.get("moe_router_load_balancing_type") == "sinkhorn":
        yield from _sinkhorn(config, config.moe, settings)
    if (settings.get("mlp_chunks_for_training") or 1) > 1:
        yield (
            "mlp_chunks_for_training balances experts by the tokens of a chunk, padding among them; remove it for a "
            "model with experts"
        )
    yield from _capacity(config.moe, settings)


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


def _sinkhorn(config: McaModelConfig, moe: Moe, settings: Values) -> Iterator[str]:
    """Yield limits of Megatron's Sinkhorn weights: softmax over all experts, sigmoid for topk 1, also in evaluation."""
    if settings.get("moe_aux_loss_coeff"):
        yield "moe_router_load_balancing_type sinkhorn has no auxiliary loss; set moe_aux_loss_coeff to 0"
    score, single = moe.moe_router_score_function, moe.moe_router_topk == 1
    alike = score == "sigmoid" if single else score == "softmax" and moe.moe_router_pre_softmax
    changed = (
        moe.moe_router_enable_expert_bias or moe.moe_router_topk_scaling_factor or has_custom_router(config)
    )
    if not alike or changed or moe.moe_router_num_groups:
        yield (
            "moe_router_load_balancing_type sinkhorn weighs experts by their chances among all, in evaluation too, "
            f"and {config.model_type} otherwise; set it to aux_loss or none"
        )


def _identity_experts(moe: Moe, settings: Values) -> Iterator[str]:
    """Yield limits of identity experts, with which tokens are sent to different numbers of experts."""
    if not moe.moe_identity_experts:
        return
    if settings.get("moe_expert_capacity_factor") is not None:
        yield ("identity experts have no capacity; remove moe_expert_capacity_factor")
    if settings.get("moe_token_dispatcher_type") == "flex":
        yield (
            "moe_token_dispatcher_type flex is not supported with identity experts, because it sends each token to the "
            "same number of experts; use alltoall or allgather"
        )


def _attention(
    config: McaModelConfig, layout: ParallelLayout, settings: Values, implementation: str
) -> Iterator[str]:
    """Yield attention variants for which the kernel in use has no context parallelism."""
    kind = settings.get("cp_comm_type")
    if _uses_local_attention(config, settings, implementation):
        if kind not in (None, "all_gather"):
            yield _gathered(config, str(kind))
        return
    if layout.cp == 1:
        return
    if not settings.get("bf16") and not settings.get("fp16"):
        yield (
            "Transformer Engine's attention has no context parallelism in fp32; train in bf16 or fp16, or set "
            "attention_backend to local"
        )
    ring = kind in (None, "p2p")
    if config.attention.window_size is not None and ring:
        yield (
            "Transformer Engine's ring attention has no sliding window; set cp_comm_type to all_gather or a2a, "
            "or attention_backend to local"
        )
    if config.attention.softmax_type != "vanilla":
        yield (
            "Transformer Engine has attention sinks under context parallelism only with cp_comm_type a2a, where each "
            "context rank counts their whole gradient and so it is added several times; set attention_backend to local"
        )
    if config.mla is not None and not ring:
        yield (
            f"Transformer Engine does not support MLA with cp_comm_type {kind}; set it to p2p, or "
            "attention_backend to local"
        )
    if kind == "a2a":
        yield from _shared_heads(config, layout)


_PACKS_SINCE: dict[str, Version] = {"all_gather": (2, 18), "a2a": (2, 10)}
"""First versions of Transformer Engine whose context-parallel attention takes packed rows, from its sources."""


def packed_problems(
    config: McaModelConfig,
    layout: ParallelLayout,
    settings: Values,
    implementation: str,
    engine: Version | None,
) -> Iterator[str]:
    """Yield why packed rows cannot be computed; arguments as in `require_supported`."""
    kind = str(settings.get("cp_comm_type"))
    if layout.cp == 1 or engine is None or _uses_local_attention(config, settings, implementation):
        return
    since = _PACKS_SINCE.get(kind, engine)
    if engine < since:
        here, first = (".".join(map(str, version[:2])) for version in (engine, since))
        yield (
            f"Transformer Engine {here} takes no packed rows with cp_comm_type {kind}; install {first} or later, set "
            "attention_backend to local, or turn packing off"
        )


def _gathered(config: McaModelConfig, kind: str) -> str:
    if custom_core_attention(config) is not None:
        return (
            f"cp_comm_type {kind} is not supported for {config.model_type}, whose attention is always mca's and "
            "gathers keys and values; set it to all_gather or remove it"
        )
    return (
        f"cp_comm_type {kind} needs Transformer Engine's attention (transformer_impl transformer_engine, "
        "attention_backend other than local); mca's attention gathers keys and values (all_gather)"
    )


def _shared_heads(config: McaModelConfig, layout: ParallelLayout) -> Iterator[str]:
    """Yield the limit of a2a: each context rank needs full heads, and the fused kernel an even number of them."""
    multiple = math.lcm(2, layout.cp)
    for kind in config.kinds():
        heads, groups = (
            max(n // layout.tp, 1)
            for n in (kind.attention.num_attention_heads, kind.attention.num_query_groups)
        )
        if heads % multiple or groups % multiple:
            yield (
                f"cp_comm_type a2a cuts the {heads} heads of a tensor rank and its {groups} of keys and values over "
                f"context_parallel_size {layout.cp}, which needs multiples of {multiple}; set it to p2p or all_gather, "
                "or change the sizes"
            )
            return


def _uses_local_attention(config: McaModelConfig, settings: Values, implementation: str) -> bool:
    """Return whether mca's own core attention computes attention."""
    backend = settings.get("attention_backend")
    chosen = backend is not None and getattr(backend, "name", backend) == "local"
    return implementation == "local" or chosen or custom_core_attention(config) is not None
