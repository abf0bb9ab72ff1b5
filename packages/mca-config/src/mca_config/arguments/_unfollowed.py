"""Settings of Megatron's that runs of ours follow; all others, and details of a switch which is off, are refused.

Megatron takes them without a word. In a name of ``_NOWHERE`` and ``_DETAILS``, ``*`` stands for any letters.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch

from mca_config.types import Typed, Values

FOLLOWED: Mapping[str, tuple[str, ...]] = {
    "changes what is computed, and is tried on a model": (
        "moe_router_force_biased",
        "mtp_detach_heads",
        "use_te_activation_func",
        "use_transformer_engine_op_fuser",
    ),
    "changes what is computed, in Megatron's code around layers of any kind": (
        "disable_bf16_reduced_precision_matmul",
        "moe_router_force_load_balancing",
    ),
    "belongs to fp8 in Transformer Engine's layers": (
        "first_last_layers_bf16",
        "fp8_amax_compute_algo",
        "fp8_amax_history_len",
        "fp8_dot_product_attention",
        "fp8_margin",
        "fp8_multi_head_attention",
        "fp8_wgrad",
        "num_layers_at_end_in_bf16",
        "num_layers_at_start_in_bf16",
        "tp_only_amax_red",
    ),
    "says what is kept in memory, and where": (
        "clone_scatter_output_in_embedding",
        "cpu_offloading_activations",
        "cpu_offloading_double_buffering",
        "cpu_offloading_retain_pinned_cpu_buffers",
        "cpu_offloading_weights",
        "deallocate_pipeline_outputs",
        "disable_parameter_transpose_cache",
        "mlp_chunks_for_training",
    ),
    "says when and with which kernels ranks exchange": (
        "batch_p2p_sync",
        "flash_attention_version",
        "moe_deepep_num_sms",
        "moe_enable_deepep",
        "moe_flex_dispatcher_backend",
        "moe_flex_dispatcher_num_sms",
        "moe_hybridep_num_blocks_permute",
        "moe_hybridep_num_blocks_unpermute",
        "moe_hybridep_num_sms",
        "moe_hybridep_num_sms_preprocessing",
        "moe_hybridep_pad_uneven_dispatch_inputs",
        "moe_permute_fusion_into_hybridep",
    ),
}
"""By what it does."""
_NOWHERE: Mapping[str, tuple[str, ...]] = {
    "it is for inference": (
        "inference_*",
        "flash_decode",
        "mlp_chunks_for_prefill",
        "symmetric_ar_type",
        "cache_mla_latents",
        "nccl_all_reduce_for_prefill",
        "moe_pad_experts_for_cuda_graph_inference",
    ),
    "no CUDA graphs are captured": (
        "cuda_graph_*",
        "delay_offload_until_cuda_graph",
        "enable_cuda_graph",
        "external_cuda_graph",
    ),
    "weights are filled from a checkpoint or a seed": (
        "perform_initialization",
        "use_cpu_initialization",
        "init_model_with_meta_device",
        "init_method_std",
        "embedding_init_method_std",
    ),
    "forward passes without gradients upset the order of what is offloaded, and it is not tried on a GPU": (
        "fine_grained_activation_offloading",
        "fine_grained_offloading_max_inflight_offloads",
        "offload_modules",
        "min_offloaded_tensor_size",
        "activation_offload_fraction",
        "delta_offload_bytes_across_pp_ranks",
    ),
    "nothing is computed in fp4": ("fp4", "fp4_*"),
    "Megatron does not look at it": (
        "apply_residual_connection_post_layernorm",
        "async_tensor_model_parallel_allreduce",
        "barrier_with_L1_time",
        "fp8_interval",
        "hetereogenous_dist_checkpoint",
        "moe_extended_tp",
        "moe_token_dropping",
        "moe_use_legacy_grouped_gemm",
        "tp_comm_atomic_*",
        "tp_comm_split_*",
    ),
    "nothing that is run here looks at it": (
        "apply_query_key_layer_scaling",
        "batch_invariant_mode",
        "config_logger_dir",
        "memory_efficient_layer_norm",
        "persist_layer_norm",
        "pipeline_model_parallel_comm_backend",
        "use_inference_optimized_layers",
        "use_te_rng_tracker",
    ),
    "the arguments of training and the checkpoint say the dtype": ("bf16", "fp16"),
    "layers compute in the dtype of their weights": ("fp32_residual_connection",),
    "products that are meant to be in fp32 would be rounded": ("enable_autocast",),
    "heads are not clipped during training": ("qk_clip", "qk_clip_*", "log_max_attention_logit"),
    "it recomputes core attention too; use recompute_modules: [moe]": ("moe_layer_recompute",),
    "overlap_moe_expert_parallel_comm is not supported": (
        "delay_wgrad_compute",
        "ep_overlap_early_attn_memory_release",
        "high_priority_a2a_comm_stream",
        "overlap_dispatch_backward_with_experts_wgrad",
    ),
    "tp_comm_overlap is not supported": ("tp_comm_*",),
    "fp8_recipe custom is not supported": ("fp8_quantizer_factory",),
    "the output layer is not computed in fp8": ("fp8_output_proj",),
    "no groups or schedules are made for it": (
        "hybrid_context_parallel",
        "hierarchical_context_parallel_sizes",
        "max_seqlen_per_dp_cp_rank",
        "num_microbatches_with_partial_activation_checkpoints",
        "moe_enable_routing_replay",
        "use_ring_exchange_p2p",
        "tensor_parallel_num_weight_shards",
        "expert_tensor_parallel_num_weight_shards",
        "gtp_weight_remat_size",
        "expert_gtp_weight_remat_size",
    ),
    "it omits factors, norms and interleaved channels": ("fused_single_qkv_rope",),
    "experts are not balanced by quantiles": ("moe_router_quantile_balancing_ema",),
    "no layers are made with it": ("use_grouped_gemm_for_dense_mlp", "use_grouped_gemm_for_shared_expert"),
    "the package of that name is not used": ("use_kitchen", "use_kitchen_attention", "kitchen_*"),
    "losses of experts are logged as one": ("moe_per_layer_logging",),
    "it is for Megatron's own tests": ("test_mode",),
}
"""By why it is refused."""
_UNTRIED = "it is not tried on the models that are built here"
_DETAILS: Mapping[str, tuple[str, ...]] = {
    "fp8": ("fp8_*", "tp_only_amax_red", "first_last_layers_bf16"),
    "first_last_layers_bf16": ("num_layers_at_*_in_bf16",),
    "fp8_recipe delayed": (
        "fp8_margin",
        "fp8_amax_*",
        "fp8_wgrad",
        "fp8_multi_head_attention",
        "tp_only_amax_red",
    ),
    "fp8_recipe delayed or tensorwise": ("fp8_dot_product_attention",),
    "cpu_offloading": ("cpu_offloading_*",),
    "moe_token_dispatcher_type flex": (
        "moe_enable_deepep",
        "moe_deepep_*",
        "moe_flex_dispatcher_*",
        "moe_hybridep_*",
        "moe_permute_fusion_into_hybridep",
    ),
    "moe_flex_dispatcher_backend deepep": ("moe_enable_deepep", "moe_deepep_*"),
    "moe_flex_dispatcher_backend hybridep": ("moe_hybridep_*", "moe_permute_fusion_into_hybridep"),
}
"""By the switch, or the switch and the words of which it has to be one."""
_UNSET: Mapping[str, str] = {"fp8_recipe": "delayed", "moe_flex_dispatcher_backend": "deepep"}
"""What Megatron takes where a switch is not set."""
_ON = (
    "activation_offload_fraction",
    "cpu_offloading_activations",
    "fp8_amax_*",
    "fp8_wgrad",
    "min_offloaded_tensor_size",
    "moe_*_num_sms*",
    "moe_flex_dispatcher_backend",
    "moe_paged_stash_*",
    "num_layers_at_*_in_bf16",
    "offload_modules",
)
"""Of untried settings and details, those that Megatron does not take as off where they are not given."""


def problems(settings: Values, given: Values) -> Iterator[str]:
    """What of ``settings`` would be taken and not followed.

    Args:
        settings: ``additional_configs``, without those that are arguments.
        given: The arguments.
    """
    for name, value in settings.items():
        if is_off(name, value):
            continue
        why = refusal(name)
        if why is not None:
            yield f"additional_configs: {name} is not supported ({why}); remove it"
            continue
        for switch, patterns in _DETAILS.items():
            if not _is_on(switch, settings, given) and _is_one_of(name, patterns):
                yield f"additional_configs: {name} needs {switch}; add it or remove {name}"
                break


def refusal(name: str) -> str | None:
    """Why no run follows the setting; None: runs do."""
    if any(name in names for names in FOLLOWED.values()):
        return None
    return next((why for why, patterns in _NOWHERE.items() if _is_one_of(name, patterns)), _UNTRIED)


def is_off(name: str, value: Typed) -> bool:
    """Whether ``value`` only says that ``name`` is off, as it is without it."""
    return value == 0 and not _is_one_of(name, _ON)


def _is_one_of(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _is_on(switch: str, settings: Values, given: Values) -> bool:
    name, _, words = switch.partition(" ")
    value = settings.get(name) or given.get(name) or _UNSET.get(name)
    return value in words.split(" or ") if words else bool(value)
