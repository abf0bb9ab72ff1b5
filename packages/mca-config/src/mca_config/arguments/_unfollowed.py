"""Settings of Megatron's that no run of ours follows, and those that are details of a switch which is off.

They are refused, because Megatron takes them without a word. In a name, ``*`` stands for any letters.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch

from mca_config.types import Values

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
    "no groups or schedules are made for it": (
        "hybrid_context_parallel",
        "hierarchical_context_parallel_sizes",
        "max_seqlen_per_dp_cp_rank",
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
_DETAILS: Mapping[str, tuple[str, ...]] = {
    "tp_comm_overlap": ("tp_comm_*",),
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
    "fp8_recipe custom": ("fp8_quantizer_factory",),
    "cpu_offloading": ("cpu_offloading_*",),
    "fine_grained_activation_offloading": (
        "offload_modules",
        "min_offloaded_tensor_size",
        "activation_offload_fraction",
        "delta_offload_bytes_across_pp_ranks",
        "fine_grained_offloading_max_inflight_offloads",
    ),
    "defer_embedding_wgrad_compute": ("wgrad_deferral_limit",),
    "qk_clip": ("qk_clip_*",),
    "moe_enable_deepep": ("moe_deepep_*",),
    "moe_paged_stash": ("moe_paged_stash_*",),
    "overlap_moe_expert_parallel_comm": ("high_priority_a2a_comm_stream",),
    "moe_token_dispatcher_type flex": (
        "moe_flex_dispatcher_*",
        "moe_hybridep_*",
        "moe_ncclep_*",
        "moe_permute_fusion_into_hybridep",
        "moe_expert_rank_capacity_factor",
    ),
}
"""By the switch, or the switch and the words of which it has to be one."""
_UNSET: Mapping[str, str] = {"fp8_recipe": "delayed"}
"""What Megatron takes where a switch is not set."""


def problems(settings: Values, given: Values) -> Iterator[str]:
    """What of ``settings`` would be taken and not followed.

    Args:
        settings: ``additional_configs``, without those that are arguments.
        given: The arguments.
    """
    for name in settings:
        for why, patterns in _NOWHERE.items():
            if any(fnmatch(name, pattern) for pattern in patterns):
                yield f"additional_configs: {name} is not supported ({why}); remove it"
                break
        else:
            for switch, patterns in _DETAILS.items():
                if not _is_on(switch, settings, given) and any(
                    fnmatch(name, pattern) for pattern in patterns
                ):
                    yield f"additional_configs: {name} needs {switch}; add it or remove {name}"


def _is_on(switch: str, settings: Values, given: Values) -> bool:
    name, _, words = switch.partition(" ")
    value = settings.get(name) or given.get(name) or _UNSET.get(name)
    return value in words.split(" or ") if words else bool(value)
