"""Contradictions among the arguments of the layout and the model, as functions from arguments to messages.

`_training_constraints` has those of training, and `mca_config.checks` checks a model against a layout.
"""

from mca_config.arguments import _unsupported_settings
from mca_config.arguments.options import DistributingOptions
from mca_config.types import Values

RECOMPUTE_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
SEQUENCE_PARALLEL_OFF = (
    "sequence_parallel cannot be off while tensor_model_parallel_size and expert_model_parallel_size are both "
    "above 1; remove sequence_parallel, or set expert_model_parallel_size to 1"
)


def find_problems(args: DistributingOptions) -> list[str]:
    """Return the contradictions among the arguments of `DistributingOptions`."""
    extra = args.additional_configs if isinstance(args.additional_configs, dict) else {}
    unsupported = _unsupported_settings.find_problems(extra, vars(args))
    return [
        *_sequence(args),
        *_recompute(args),
        *_experts(args),
        *_precision(args),
        *_ranges(args),
        *unsupported,
    ]


def _sequence(args: DistributingOptions) -> list[str]:
    problems = []
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        problems.append(
            "sequence_parallel needs tensor_model_parallel_size of at least 2; remove sequence_parallel or "
            "raise the size"
        )
    both = (args.tensor_model_parallel_size or 1) > 1 and (args.expert_model_parallel_size or 1) > 1
    if args.sequence_parallel is False and both:
        problems.append(SEQUENCE_PARALLEL_OFF)
    if args.sequence_parallel and args.distribute_saved_activations:
        problems.append("distribute_saved_activations excludes sequence_parallel; remove one of the two")
    if args.overlap_p2p_comm and args.batch_p2p_comm:
        problems.append("overlap_p2p_comm excludes batch_p2p_comm; remove one of the two")
    return problems


def _recompute(args: DistributingOptions) -> list[str]:
    problems = []
    kind = args.recompute_granularity
    if kind == "full" and (args.recompute_method is None or args.recompute_num_layers is None):
        problems.append(
            "recompute_granularity full needs recompute_method (uniform or block) and recompute_num_layers; "
            "add them"
        )
    if kind != "full":
        full_only = [
            name for name in ("recompute_method", "recompute_num_layers") if getattr(args, name) is not None
        ]
        if full_only:
            problems.append(
                f"{' and '.join(full_only)} needs recompute_granularity full; add it or remove {full_only[0]}"
            )
    if args.recompute_modules is not None and kind != "selective":
        problems.append(
            "recompute_modules needs recompute_granularity selective; add it or remove the modules"
        )
    unknown = [name for name in args.recompute_modules or () if name not in RECOMPUTE_MODULES]
    if unknown:
        problems.append(f"recompute_modules: {', '.join(unknown)} is none of {', '.join(RECOMPUTE_MODULES)}")
    if args.distribute_saved_activations and kind != "full":
        problems.append(
            "distribute_saved_activations needs recompute_granularity full; add it or remove "
            "distribute_saved_activations"
        )
    if args.cpu_offloading_num_layers and not args.cpu_offloading:
        problems.append(
            "cpu_offloading_num_layers needs cpu_offloading; add it or remove cpu_offloading_num_layers"
        )
    if args.cpu_offloading and (kind is not None or (args.pipeline_model_parallel_size or 1) > 1):
        problems.append(
            "cpu_offloading excludes recompute_granularity and pipeline_model_parallel_size above 1; remove it"
        )
    return problems


def _experts(args: DistributingOptions) -> list[str]:
    problems = []
    dispatcher = args.moe_token_dispatcher_type
    if args.variable_seq_lengths and dispatcher == "allgather":
        problems.append(
            "variable_seq_lengths excludes moe_token_dispatcher_type allgather; use alltoall or remove "
            "variable_seq_lengths"
        )
    if args.moe_pad_expert_input_to_capacity and args.moe_expert_capacity_factor is None:
        problems.append(
            "moe_pad_expert_input_to_capacity needs moe_expert_capacity_factor; add it (1.0 is an even share)"
        )
    if args.moe_token_drop_policy is not None and args.moe_expert_capacity_factor is None:
        problems.append(
            "moe_token_drop_policy needs moe_expert_capacity_factor, without which no token is dropped; add it or "
            "remove moe_token_drop_policy"
        )
    if args.moe_expert_capacity_factor is not None and args.moe_router_load_balancing_type == "sinkhorn":
        problems.append(
            "moe_expert_capacity_factor excludes moe_router_load_balancing_type sinkhorn; use aux_loss or none"
        )
    if args.moe_shared_expert_overlap and dispatcher not in (None, "alltoall"):
        problems.append(
            f"moe_shared_expert_overlap needs moe_token_dispatcher_type alltoall, not {dispatcher}; change it "
            "or remove the overlap"
        )
    if args.overlap_moe_expert_parallel_comm:
        problems += _expert_overlap(args)
    return problems


def _expert_overlap(args: DistributingOptions) -> list[str]:
    name = "overlap_moe_expert_parallel_comm"
    wrong = {
        "expert_model_parallel_size 1": args.expert_model_parallel_size == 1,
        "moe_token_dispatcher_type allgather": args.moe_token_dispatcher_type == "allgather",
        "recompute_granularity full": args.recompute_granularity == "full",
        "moe_shared_expert_overlap": bool(args.moe_shared_expert_overlap),
    }
    return [f"{name} excludes {option}; remove one of the two" for option, is_set in wrong.items() if is_set]


def _precision(args: DistributingOptions) -> list[str]:
    needing = [name for name in ("fp8_param", "fp8_recipe") if getattr(args, name) and args.fp8 is None]
    problems = [f"{name} needs fp8 (e4m3 or hybrid); add it or remove {name}" for name in needing]
    if args.cross_entropy_fusion_impl is not None and not args.cross_entropy_loss_fusion:
        problems.append(
            "cross_entropy_fusion_impl needs cross_entropy_loss_fusion; add it or remove cross_entropy_fusion_impl"
        )
    if args.transformer_impl == "local":
        problems += transformer_engine_problems(vars(args))
    return problems


_TRANSFORMER_ENGINE_ONLY = (
    "fp8",
    "tp_comm_overlap",
    "cpu_offloading",
    "moe_permute_fusion",
    "moe_router_fusion",
    "apply_rope_fusion",
    "use_te_activation_func",
    "use_transformer_engine_op_fuser",
    "flash_attention_version",
)


def transformer_engine_problems(settings: Values) -> list[str]:
    """Return messages about ``settings`` that only Transformer Engine's layers support."""
    return [
        f"{name} needs transformer_impl transformer_engine; change it or remove {name.split()[0]}"
        for name in transformer_engine_options(settings)
    ]


def transformer_engine_options(settings: Values) -> list[str]:
    """Return those of ``settings`` that only Transformer Engine's layers support, some with their value."""
    backend = settings.get("attention_backend")
    backend = getattr(backend, "name", backend)  # Megatron's enumeration, or the name of a member
    options = [name for name in _TRANSFORMER_ENGINE_ONLY if settings.get(name)]
    options += [f"attention_backend {backend}"] if backend in ("flash", "fused", "unfused") else []
    options += ["cross_entropy_fusion_impl te"] if settings.get("cross_entropy_fusion_impl") == "te" else []
    return options


_AT_LEAST_ZERO = (
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_input_jitter_eps",
    "mtp_num_layers",
    "mtp_loss_scaling_factor",
    "cpu_offloading_num_layers",
)
_AT_LEAST_ONE = ("recompute_num_layers", "microbatch_group_size_per_vp_stage")


def _ranges(args: DistributingOptions) -> list[str]:
    problems = []
    for names, least in ((_AT_LEAST_ZERO, 0), (_AT_LEAST_ONE, 1)):
        for name in names:
            value = getattr(args, name)
            if value is not None and value < least:
                problems.append(f"{name} must be at least {least}, not {value}")
    for name in ("attention_dropout", "hidden_dropout"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < 1:
            problems.append(f"{name} must be at least 0 and below 1, not {value}")
    factor = args.moe_expert_capacity_factor
    if factor is not None and factor <= 0:
        problems.append(f"moe_expert_capacity_factor must be above 0, not {factor}; remove it for no limit")
    return problems
