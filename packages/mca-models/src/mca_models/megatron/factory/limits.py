"""What the installed megatron-core, or this machine, would compute wrongly or not at all: refused by name.

Each was found by comparing losses and gradients over layouts; each has a test.
"""

import math
from collections.abc import Iterator

from mca_config.arguments import transformer_engine_problems
from mca_config.errors import raise_problems
from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig, MlaMcaModelConfig
from mca_config.pipeline import PipelinePlan, pipeline_plan
from mca_config.printable import counted
from mca_config.rope import require_rope
from mca_config.types import Values
from mca_models.megatron.factory.execution import waits_for_sends
from mca_models.megatron.factory.fused_limits import FIXED_IN_0_17, Version, fused_problems, has_altered_glu
from mca_models.megatron.families.core_attention import custom_core_attention
from mca_models.megatron.families.group_router import custom_group_router
from mca_models.megatron.families.router import custom_router


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
    """Raises one error with all that cannot be run.

    Args:
        config: The model.
        layout: The parallel sizes.
        settings: What goes into Megatron's ``TransformerConfig``.
        device: ``cpu`` or ``cuda``.
        version: megatron-core's.
        implementation: ``local`` or ``transformer_engine``.
        engine: Transformer Engine's version; None: it is not there.
        packed: Whether rows hold several sequences.
    """
    require_rope(config.rope_scaling)
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
    if layout.vpp > 1 and config.tie_word_embeddings and {*middle} & {*_plan(config, layout).embedding_ranks}:
        yield (
            "megatron-core cannot tie the embedding to prediction layers on a pipeline rank between the first and "
            "the last with virtual stages; move m of pipeline_model_parallel_layout into the stage of L"
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
    """On the local layers Megatron adds up whole gradients of the queries' norm, once for each tensor rank.

    In Transformer Engine's layers the ranks do not add up theirs of the rotary key that all heads share.
    """
    if isinstance(config, MlaMcaModelConfig) and layout.tp > 1 and not settings.get("sequence_parallel"):
        yield (
            "megatron-core computes wrong gradients of latent attention with tensor_model_parallel_size above 1 and no "
            "sequence_parallel; set sequence_parallel to true"
        )


def _recomputation(
    config: McaModelConfig, layout: ParallelLayout, settings: Values, version: Version
) -> Iterator[str]:
    """Megatron takes so many layers of a stage at a time, of prediction layers one; 0.16 runs past the stage's last."""
    yield from _selective(config, settings)
    count = settings.get("recompute_num_layers") or 1
    if settings.get("recompute_method") != "uniform" or count == 1:
        return
    if settings.get("mtp_num_layers"):
        yield (
            f"megatron-core cannot recompute prediction layers {count} layers at a time; change recompute_num_layers "
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
    """Parts that look at what another part of the layer was given, which is gone when they are computed again."""
    if settings.get("recompute_granularity") != "selective":
        return
    modules = settings.get("recompute_modules") or ["core_attn"]
    indexed = isinstance(config, MlaMcaModelConfig) and config.index_topk is not None
    if "core_attn" in modules and (indexed or config.index_blocks is not None):
        yield (
            "attention to chosen keys cannot be recomputed on its own; remove core_attn from "
            "recompute_modules, or set recompute_granularity to full"
        )
    if "mlp" in modules and (settings.get("mlp_chunks_for_training") or 1) > 1:
        yield (
            "MLPs that are computed again are not cut into chunks; remove mlp from recompute_modules, or "
            "mlp_chunks_for_training"
        )
    if "layernorm" in modules and (config.parallel_block != "none" or config.moe_shortcut):
        yield (
            "norms cannot be recomputed on their own if attention and MLP, or MLP and experts, are side by side; "
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


def _routing(config: McaModelConfig, settings: Values) -> Iterator[str]:
    if settings.get("moe_apply_probs_on_input") and settings.get("moe_router_topk") != 1:
        yield "moe_apply_probs_on_input needs num_experts_per_tok 1; remove it"
    if settings.get("moe_shared_expert_overlap") and config.moe_latent_size:
        yield "shared experts cannot overlap where routed ones take a projection; remove moe_shared_expert_overlap"
    if settings.get("moe_shared_expert_overlap") and has_altered_glu(config):
        yield (
            "shared experts that overlap omit what the model adds to or clamps in its gated MLPs; remove "
            "moe_shared_expert_overlap"
        )
    if settings.get("moe_router_fusion") and custom_router(config) is not None:
        topk, groups = config.moe_router_topk, config.moe_router_group_topk
        sizes = (
            f" with num_experts_per_tok {topk} and topk_group {groups}" if custom_group_router(config) else ""
        )
        yield f"the fused router chooses other experts than {config.model_type}{sizes}; remove moe_router_fusion"
    if settings.get("moe_shared_expert_overlap") and (config.experts_beside_mlp or config.moe_shortcut):
        yield (
            "an MLP beside experts cannot be computed while tokens are sent to these, as its norms would be left out, "
            "or both would be added at once; remove moe_shared_expert_overlap"
        )
    if config.experts_beside_mlp and settings.get("moe_token_dispatcher_type") == "flex":
        yield (
            "moe_token_dispatcher_type flex sends tokens to the experts of their largest weights, and this model's "
            "may be negative; use alltoall or allgather"
        )
    yield from _identity_experts(config, settings)
    if settings.get("moe_router_load_balancing_type") == "sinkhorn":
        yield from _sinkhorn(config, settings)
    if config.num_moe_experts is not None and (settings.get("mlp_chunks_for_training") or 1) > 1:
        yield (
            "mlp_chunks_for_training balances experts by the tokens of a chunk, padding among them; remove it for a "
            "model with experts"
        )
    share = config.moe_router_topk / (config.num_moe_experts or 1)
    if (
        settings.get("moe_pad_expert_input_to_capacity")
        and settings["moe_expert_capacity_factor"] * share > 1
    ):
        yield (
            "megatron-core cannot pad experts to a capacity above the number of all tokens, and "
            f"moe_expert_capacity_factor {settings['moe_expert_capacity_factor']} exceeds it; lower it to "
            f"{1 / share:g}, or remove moe_pad_expert_input_to_capacity"
        )


def _sinkhorn(config: McaModelConfig, settings: Values) -> Iterator[str]:
    """Megatron's own weights, in evaluation too: chances among all experts, of a single one by sigmoid."""
    if settings.get("moe_aux_loss_coeff"):
        yield "moe_router_load_balancing_type sinkhorn has no auxiliary loss; set moe_aux_loss_coeff to 0"
    score, single = config.moe_router_score_function, config.moe_router_topk == 1
    alike = score == "sigmoid" if single else score == "softmax" and config.moe_router_pre_softmax
    changed = (
        config.moe_router_enable_expert_bias or config.moe_router_topk_scaling_factor or custom_router(config)
    )
    if not alike or changed or config.moe_router_num_groups:
        yield (
            "moe_router_load_balancing_type sinkhorn weighs experts by their chances among all, in evaluation too, "
            f"and {config.model_type} otherwise; set it to aux_loss or none"
        )


def _identity_experts(config: McaModelConfig, settings: Values) -> Iterator[str]:
    """A token is not sent to as many experts as another one."""
    if not config.moe_identity_experts:
        return
    if settings.get("moe_expert_capacity_factor") is not None:
        yield (
            "experts that give a token back as it is have no capacity that would be met; remove "
            "moe_expert_capacity_factor"
        )
    if settings.get("moe_token_dispatcher_type") == "flex":
        yield (
            "moe_token_dispatcher_type flex sends each token to equally many experts, of which some here have no "
            "weights; use alltoall or allgather"
        )


def _attention(
    config: McaModelConfig, layout: ParallelLayout, settings: Values, implementation: str
) -> Iterator[str]:
    """Kinds of attention that the kernel in use has no context parallelism for."""
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
    if config.window_size is not None and ring:
        yield (
            "Transformer Engine's ring attention has no sliding window; set cp_comm_type to all_gather or a2a, "
            "or attention_backend to local"
        )
    if config.softmax_type != "vanilla":
        yield (
            "Transformer Engine has attention sinks under context parallelism only with cp_comm_type a2a, where each "
            "context rank counts their whole gradient and so it is added several times; set attention_backend to local"
        )
    if isinstance(config, MlaMcaModelConfig) and not ring:
        yield (
            f"Transformer Engine has no latent attention with cp_comm_type {kind}; set it to p2p, or "
            "attention_backend to local"
        )
    if kind == "a2a":
        yield from _shared_heads(config, layout)


_PACKS_SINCE: dict[str, Version] = {"all_gather": (2, 18), "a2a": (2, 10)}
"""Transformer Engine's first versions whose attention over context ranks takes packed rows, read in its sources."""


def packed_problems(
    config: McaModelConfig,
    layout: ParallelLayout,
    settings: Values,
    implementation: str,
    engine: Version | None,
) -> Iterator[str]:
    """What rows of several sequences cannot be computed with; see `require_supported`."""
    kind = str(settings.get("cp_comm_type"))
    if layout.cp == 1 or engine is None or _uses_local_attention(config, settings, implementation):
        return
    since = _PACKS_SINCE.get(kind, engine)
    if engine < since:
        here, first = (".".join(map(str, version[:2])) for version in (engine, since))
        yield (
            f"Transformer Engine {here} takes no packed rows with cp_comm_type {kind}; install {first} or later, set "
            "attention_backend to local, or do without packing"
        )


def _gathered(config: McaModelConfig, kind: str) -> str:
    if custom_core_attention(config) is not None:
        return (
            f"cp_comm_type {kind} is not for {config.model_type}, whose attention is always mca's own and gathers keys "
            "and values; set it to all_gather or remove it"
        )
    return (
        f"cp_comm_type {kind} needs Transformer Engine's attention (transformer_impl transformer_engine, "
        "attention_backend other than local); mca's own attention gathers keys and values (all_gather)"
    )


def _shared_heads(config: McaModelConfig, layout: ParallelLayout) -> Iterator[str]:
    """Context ranks that share heads need whole ones, and Transformer Engine's fused kernel an even number of them."""
    multiple = math.lcm(2, layout.cp)
    for kind in config.kinds():
        heads, groups = (max(n // layout.tp, 1) for n in (kind.num_attention_heads, kind.num_query_groups))
        if heads % multiple or groups % multiple:
            yield (
                f"cp_comm_type a2a cuts the {heads} heads of a tensor rank and its {groups} of keys and values over "
                f"context_parallel_size {layout.cp}, which needs multiples of {multiple}; set it to p2p or all_gather, "
                "or change the sizes"
            )
            return


def _uses_local_attention(config: McaModelConfig, settings: Values, implementation: str) -> bool:
    """Whether attention is computed by our own core attention."""
    backend = settings.get("attention_backend")
    chosen = backend is not None and getattr(backend, "name", backend) == "local"
    return implementation == "local" or chosen or custom_core_attention(config) is not None
