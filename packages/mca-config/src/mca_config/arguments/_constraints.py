"""Which arguments contradict one another: pure tables and functions from arguments to messages.

No model and no machine is looked at: whether a model fits is said by `mca_config.checks`.
"""

from mca_config.arguments import _unfollowed
from mca_config.arguments.options import DistributingOptions, TrainingOptions
from mca_config.types import Values

RECOMPUTE_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
SEQUENCE_PARALLEL_OFF = (
    "sequence_parallel cannot be off while tensor_model_parallel_size and expert_model_parallel_size are both "
    "above 1; remove sequence_parallel, or set expert_model_parallel_size to 1"
)


def of_distribution(args: DistributingOptions) -> list[str]:
    """Contradictions among the arguments of `DistributingOptions`."""
    extra = args.additional_configs if isinstance(args.additional_configs, dict) else {}
    unfollowed = _unfollowed.problems(extra, vars(args))
    return [
        *_sequence(args),
        *_recompute(args),
        *_experts(args),
        *_precision(args),
        *_ranges(args),
        *unfollowed,
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
        given = [
            name for name in ("recompute_method", "recompute_num_layers") if getattr(args, name) is not None
        ]
        if given:
            problems.append(
                f"{' and '.join(given)} needs recompute_granularity full; add it or remove {given[0]}"
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
            "moe_token_drop_policy needs moe_expert_capacity_factor, without which nothing is dropped; add it or "
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
    return [f"{name} excludes {what}; remove one of the two" for what, is_so in wrong.items() if is_so]


def _precision(args: DistributingOptions) -> list[str]:
    needing = [name for name in ("fp8_param", "fp8_recipe") if getattr(args, name) and args.fp8 is None]
    problems = [f"{name} needs fp8 (e4m3 or hybrid); add it or remove {name}" for name in needing]
    if args.cross_entropy_fusion_impl is not None and not args.cross_entropy_loss_fusion:
        problems.append(
            "cross_entropy_fusion_impl needs cross_entropy_loss_fusion; add it or remove cross_entropy_fusion_impl"
        )
    if args.transformer_impl == "local":
        problems += needing_engine(vars(args))
    return problems


_OF_ENGINE = (
    "fp8",
    "tp_comm_overlap",
    "cpu_offloading",
    "moe_permute_fusion",
    "moe_router_fusion",
    "apply_rope_fusion",
    "fused_single_qkv_rope",
    "fine_grained_activation_offloading",
    "use_te_activation_func",
)


def needing_engine(settings: Values) -> list[str]:
    """What in ``settings`` only Transformer Engine's layers do."""
    backend = settings.get("attention_backend")
    backend = getattr(backend, "name", backend)  # Megatron's enumeration, or its word
    wanted = [name for name in _OF_ENGINE if settings.get(name)]
    wanted += [f"attention_backend {backend}"] if backend in ("flash", "fused", "unfused") else []
    wanted += ["cross_entropy_fusion_impl te"] if settings.get("cross_entropy_fusion_impl") == "te" else []
    return [
        f"{name} needs transformer_impl transformer_engine; change it or remove {name.split()[0]}"
        for name in wanted
    ]


_AT_LEAST_ZERO = (
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_input_jitter_eps",
    "mtp_num_layers",
    "mtp_loss_scaling_factor",
    "cpu_offloading_num_layers",
)
_OFFLOAD_DETAILS = (
    "use_torch_optimizer_for_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
    "pin_cpu_grads",
    "pin_cpu_params",
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


def of_training(args: TrainingOptions) -> list[str]:
    """Contradictions among the arguments that `TrainingOptions` adds."""
    return [*_overlap(args), *_optimizer(args), *_scale(args), *_offload(args), *_loss(args), *_saving(args)]


def _overlap(args: TrainingOptions) -> list[str]:
    problems = []
    missing = [
        name for name in ("use_distributed_optimizer", "overlap_grad_reduce") if not getattr(args, name)
    ]
    if args.overlap_param_gather and missing:
        problems.append(
            f"overlap_param_gather needs {' and '.join(missing)}; set to true, or remove overlap_param_gather"
        )
    if args.ddp_average_in_collective:
        problems.append(
            "ddp_average_in_collective excludes calculate_per_token_loss, as which the loss is always computed; "
            "remove it"
        )
    if args.num_distributed_optimizer_instances not in (None, 1):
        problems.append(
            f"num_distributed_optimizer_instances {args.num_distributed_optimizer_instances} is not supported: the "
            "state is split over all data-parallel ranks; remove it"
        )
    if args.overlap_moe_expert_parallel_comm:
        problems.append(
            "overlap_moe_expert_parallel_comm is not supported in training, which does not build Megatron's schedule "
            "plans; remove it"
        )
    if args.ddp_bucket_size is not None and not args.overlap_grad_reduce:
        problems.append(
            "ddp_bucket_size needs overlap_grad_reduce, without which there is one bucket; add it or remove "
            "ddp_bucket_size"
        )
    if args.ddp_bucket_size is not None and args.ddp_bucket_size < 1:
        problems.append(f"ddp_bucket_size must be at least 1 parameter, not {args.ddp_bucket_size}")
    return problems


def _optimizer(args: TrainingOptions) -> list[str]:
    problems = []
    if args.optimizer == "muon" and (args.use_distributed_optimizer or args.overlap_param_gather):
        problems.append(
            "optimizer muon excludes use_distributed_optimizer and overlap_param_gather; remove them or use adam"
        )
    if args.optimizer == "sgd" and args.use_distributed_optimizer:
        problems.append(
            "optimizer sgd excludes use_distributed_optimizer, which splits Adam's state only; remove one of the two"
        )
    if args.sgd_momentum is not None and args.optimizer != "sgd":
        problems.append("sgd_momentum needs optimizer sgd; set it or remove sgd_momentum")
    if args.use_precision_aware_optimizer and not (
        args.use_distributed_optimizer and args.optimizer in (None, "adam")
    ):
        problems.append(
            "use_precision_aware_optimizer needs use_distributed_optimizer and optimizer adam; set them or "
            "remove it"
        )
    return problems


_OF_DYNAMIC_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def _scale(args: TrainingOptions) -> list[str]:
    dynamic = [name for name in _OF_DYNAMIC_SCALE if getattr(args, name) is not None]
    given = dynamic + (["loss_scale"] if args.loss_scale is not None else [])
    problems = []
    if given and not vars(args).get("fp16", True):  # only training arguments know it
        problems.append(f"{' and '.join(given)} needs fp16; add it or remove {given[0]}")
    if dynamic and args.loss_scale is not None:
        problems.append(
            f"loss_scale is fixed, which excludes {' and '.join(dynamic)}; remove loss_scale or the other"
        )
    return problems


def _offload(args: TrainingOptions) -> list[str]:
    problems = []
    fraction = args.optimizer_offload_fraction
    if fraction is not None and not 0 <= fraction <= 1:
        problems.append(f"optimizer_offload_fraction must be between 0 and 1, not {fraction}")
    if fraction is not None and not args.optimizer_cpu_offload:
        problems.append(
            "optimizer_offload_fraction needs optimizer_cpu_offload; add it or remove the fraction"
        )
    given = [name for name in _OFFLOAD_DETAILS if getattr(args, name)]
    if given and not args.optimizer_cpu_offload:
        problems.append(f"{' and '.join(given)} needs optimizer_cpu_offload; add it or remove {given[0]}")
    if args.optimizer_cpu_offload and args.optimizer not in (None, "adam"):
        problems.append(
            f"optimizer_cpu_offload needs optimizer adam, not {args.optimizer}; remove one of the two"
        )
    if args.use_torch_optimizer_for_cpu_offload is False:
        problems.append(
            "use_torch_optimizer_for_cpu_offload cannot be false: Megatron has no other optimizer on the host; "
            "remove it"
        )
    if args.pin_cpu_params is False:
        problems.append(
            "pin_cpu_params cannot be false: Megatron always pins the weights on the host; remove it"
        )
    return problems


def _loss(args: TrainingOptions) -> list[str]:
    problems = []
    size = args.loss_chunk_size
    if size is not None and size < 1:
        problems.append(f"loss_chunk_size must be at least 1 token, not {size}")
    if args.calculate_per_token_loss is False:
        problems.append(
            "calculate_per_token_loss cannot be false: the loss is the mean over all target tokens of the global "
            "batch; remove it"
        )
    return problems


def _saving(args: TrainingOptions) -> list[str]:
    if args.async_save and args.ckpt_format != "torch_dist":
        return [
            f"async_save needs ckpt_format torch_dist, not {args.ckpt_format}; change it or remove async_save"
        ]
    return []
