"""``additional_configs``: Megatron settings without a declared argument, checked by name without importing Megatron.

Unsupported settings, and details of a feature that is off, are errors; Megatron itself accepts them silently. In a name
of ``_UNSUPPORTED`` and ``_DETAILS``, ``*`` matches any letters.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mca_config import _megatron_keys as keys
from mca_config.errors import McaError
from mca_config.types import JsonObject, Typed, Values

SUPPORTED: Mapping[str, tuple[str, ...]] = {
    "changes the computation, tested on a model": (
        "moe_router_force_biased",
        "mtp_detach_heads",
        "use_te_activation_func",
        "use_transformer_engine_op_fuser",
    ),
    "changes the computation, in Megatron's code around all layers": (
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
    "controls which tensors stay in memory, and where": (
        "clone_scatter_output_in_embedding",
        "cpu_offloading_activations",
        "cpu_offloading_double_buffering",
        "cpu_offloading_retain_pinned_cpu_buffers",
        "cpu_offloading_weights",
        "deallocate_pipeline_outputs",
        "disable_parameter_transpose_cache",
        "mlp_chunks_for_training",
    ),
    "controls the time and kernels of communication": (
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
"""Supported settings, by effect."""
_UNSUPPORTED: Mapping[str, tuple[str, ...]] = {
    "it is for inference": (
        "inference_*",
        "flash_decode",
        "mlp_chunks_for_prefill",
        "symmetric_ar_type",
        "cache_mla_latents",
        "nccl_all_reduce_for_prefill",
        "moe_pad_experts_for_cuda_graph_inference",
    ),
    "mca captures no CUDA graphs": (
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
    "forward passes without gradients break the offloading order, and it is not tested on a GPU": (
        "fine_grained_activation_offloading",
        "fine_grained_offloading_max_inflight_offloads",
        "offload_modules",
        "min_offloaded_tensor_size",
        "activation_offload_fraction",
        "delta_offload_bytes_across_pp_ranks",
    ),
    "fp4 is not supported": ("fp4", "fp4_*"),
    "Megatron does not read it": (
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
    "mca uses no code that reads it": (
        "apply_query_key_layer_scaling",
        "batch_invariant_mode",
        "config_logger_dir",
        "memory_efficient_layer_norm",
        "persist_layer_norm",
        "pipeline_model_parallel_comm_backend",
        "use_inference_optimized_layers",
        "use_te_rng_tracker",
    ),
    "the training arguments and the checkpoint set the dtype": ("bf16", "fp16"),
    "layers compute in the dtype of their weights": ("fp32_residual_connection",),
    "it would round matrix products that need fp32": ("enable_autocast",),
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
    "mca creates no process groups or schedules for it": (
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
    "mca builds no layers with it": ("use_grouped_gemm_for_dense_mlp", "use_grouped_gemm_for_shared_expert"),
    "the package of that name is not used": ("use_kitchen", "use_kitchen_attention", "kitchen_*"),
    "MoE losses are logged as one sum over layers": ("moe_per_layer_logging",),
    "it is for Megatron's own tests": ("test_mode",),
}
"""Unsupported settings, by reason."""
_UNTRIED = "it is not tested with the models of mca"
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
"""Details by the option that they need, with its allowed values if it is not a bool."""
_UNSET: Mapping[str, str] = {"fp8_recipe": "delayed", "moe_flex_dispatcher_backend": "deepep"}
"""Megatron's defaults of unset options."""
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
"""Untested settings and details whose default in Megatron is not off."""


def setting_problems(settings: Values, arguments: Values) -> Iterator[str]:
    """Yield messages about ``settings`` that Megatron would accept without effect.

    Args:
        settings: ``additional_configs``, without those that are arguments.
        arguments: The arguments.
    """
    for name, value in settings.items():
        if is_off(name, value):
            continue
        why = unsupported_reason(name)
        if why is not None:
            yield f"additional_configs: {name} is not supported ({why}); remove it"
            continue
        for switch, patterns in _DETAILS.items():
            if not _is_on(switch, settings, arguments) and _matches(name, patterns):
                yield f"additional_configs: {name} needs {switch}; add it or remove {name}"
                break


def unsupported_reason(name: str) -> str | None:
    """Return the reason why the setting is not supported; None: it is."""
    if any(name in names for names in SUPPORTED.values()):
        return None
    return next((why for why, patterns in _UNSUPPORTED.items() if _matches(name, patterns)), _UNTRIED)


def is_off(name: str, value: Typed) -> bool:
    """Return whether ``value`` turns ``name`` off, which is also its default."""
    return value == 0 and not _matches(name, _ON)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _is_on(switch: str, settings: Values, arguments: Values) -> bool:
    name, _, words = switch.partition(" ")
    value = settings.get(name) or arguments.get(name) or _UNSET.get(name)
    return value in words.split(" or ") if words else bool(value)


_NAME = "additional_configs"


def read(value: JsonObject | str | None) -> JsonObject | None:
    """Return the settings from a dict, inline JSON, or the path of a file."""
    if value is None:
        return None
    if isinstance(value, str):
        value = _parse_text(value)
    if not isinstance(value, dict):
        raise McaError(f"{_NAME} must be an object of settings, not {value!r}")
    return dict(value)


def _parse_text(text: str) -> Typed:
    if text.lstrip().startswith("{"):
        return _parse_json(text, _NAME)
    path = Path(text)
    if not path.is_file():
        raise McaError(f"{_NAME}: {text!r} is neither inline JSON nor an existing file; give one of the two")
    contents = path.read_text(encoding="utf-8")
    return (
        _parse_yaml(contents, path)
        if path.suffix in (".yaml", ".yml")
        else _parse_json(contents, f"{_NAME}: {path}")
    )


def _parse_json(text: str, where: str) -> Typed:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise McaError(f"{where}: not valid JSON: {error}") from error


def _parse_yaml(text: str, path: Path) -> Typed:
    try:
        from mca_config.yaml_text import parse
    except ImportError as error:
        raise McaError(
            f"{_NAME}: reading {path} needs pyyaml; install it or write the file as JSON"
        ) from error
    try:
        return parse(text)
    except ValueError as error:
        raise McaError(f"{_NAME}: {path} is not valid YAML: {error}") from error


def move_to_arguments(args: Any, settings: JsonObject | None) -> None:
    """Check the names in ``settings``, and move those with a declared argument to ``args``.

    Null values are removed, and so are unsupported settings that are off.
    """
    if not settings:
        return
    declared = {field.name for field in dataclasses.fields(args)} - {_NAME}
    known = settable_keys()
    for name in list(settings):
        if name in keys.ARCHITECTURE:
            raise McaError(
                f"{_NAME}: {name} belongs to the model, not to its computation; remove it (the checkpoint's "
                "config.json says what the weights mean)"
            )
        if name not in declared and name not in known:
            raise McaError(
                f"{_NAME}: unknown key {name}{_suggestion(name, known | declared)}; rename or remove it"
            )
        if name not in declared:
            value = settings[name]
            if value is None or (unsupported_reason(name) and is_off(name, value)):
                del settings[name]
            continue
        value = settings.pop(name)
        if getattr(args, name) not in (None, value):
            raise McaError(
                f"{_NAME}: {name} is {value!r}, but the argument {name} is {getattr(args, name)!r}; remove one"
            )
        setattr(args, name, value)


def settable_keys() -> frozenset[str]:
    """Return the settings of the installed megatron-core, or of all supported versions if none is installed."""
    from importlib import metadata  # slow to import, rarely needed

    try:
        version = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        version = ""
    only = {"0.16": keys.ONLY_0_16, "0.19": keys.ONLY_0_19}
    return keys.COMMON | only.get(".".join(version.split(".")[:2]), keys.ONLY_0_16 | keys.ONLY_0_19)


def _suggestion(name: str, known: frozenset[str]) -> str:
    from difflib import get_close_matches  # a correct setting needs none

    close = get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
