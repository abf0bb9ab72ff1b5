"""Contradictions among the arguments of training, as functions from arguments to messages.

``mca_train`` checks the arguments against the model.
"""

from mca_config.arguments.training_options import TrainingOptions


def find_problems(args: TrainingOptions) -> list[str]:
    """Return the contradictions among the arguments that `TrainingOptions` adds."""
    return [
        *_overlap(args),
        *_optimizer(args),
        *_scale(args),
        *_offload(args),
        *_loss(args),
        *_saving(args),
        *_profile(args),
    ]


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
            "ddp_average_in_collective excludes calculate_per_token_loss, which is always on; remove it"
        )
    if args.num_distributed_optimizer_instances not in (None, 1):
        problems.append(
            f"num_distributed_optimizer_instances {args.num_distributed_optimizer_instances} is not supported: the "
            "state is split over all data-parallel ranks; remove it"
        )
    if args.overlap_moe_expert_parallel_comm:
        problems.append(
            "overlap_moe_expert_parallel_comm is not supported in training, which does not use Megatron's schedule "
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


_DYNAMIC_LOSS_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def _scale(args: TrainingOptions) -> list[str]:
    dynamic = [name for name in _DYNAMIC_LOSS_SCALE if getattr(args, name) is not None]
    options = dynamic + (["loss_scale"] if args.loss_scale is not None else [])
    problems = []
    if options and not vars(args).get("fp16", True):  # only TrainingArguments has this field
        problems.append(f"{' and '.join(options)} needs fp16; add it or remove {options[0]}")
    if dynamic and args.loss_scale is not None:
        problems.append(
            f"loss_scale is fixed, which excludes {' and '.join(dynamic)}; remove loss_scale or the other"
        )
    if vars(args).get("fp16"):
        problems += float16_problems(args)
    return problems


def float16_problems(args: TrainingOptions) -> list[str]:
    """Return the contradictions with training in float16, which ``fp16`` or the dtype of the checkpoint selects."""
    problems = []
    if args.optimizer == "muon":
        problems.append("optimizer muon excludes fp16: Megatron supports bf16 and fp32; use bf16, or adam")
    if args.check_for_nan_in_grad and args.loss_scale is None:
        problems.append(
            "check_for_nan_in_grad with fp16 needs loss_scale: the search for a dynamic loss scale lets gradients "
            "overflow and skips these steps; set loss_scale, or remove check_for_nan_in_grad"
        )
    return problems


_OFFLOAD_DETAILS = (
    "use_torch_optimizer_for_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
    "pin_cpu_grads",
    "pin_cpu_params",
)


def _offload(args: TrainingOptions) -> list[str]:
    problems = []
    fraction = args.optimizer_offload_fraction
    if fraction is not None and not 0 <= fraction <= 1:
        problems.append(f"optimizer_offload_fraction must be between 0 and 1, not {fraction}")
    if fraction is not None and not args.optimizer_cpu_offload:
        problems.append(
            "optimizer_offload_fraction needs optimizer_cpu_offload; add it or remove the fraction"
        )
    details = [name for name in _OFFLOAD_DETAILS if getattr(args, name)]
    if details and not args.optimizer_cpu_offload:
        problems.append(f"{' and '.join(details)} needs optimizer_cpu_offload; add it or remove {details[0]}")
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


def _profile(args: TrainingOptions) -> list[str]:
    problems = []
    if not 1 <= args.profile_step_start <= args.profile_step_end:
        problems.append(
            f"profile_step_start is {args.profile_step_start} and profile_step_end {args.profile_step_end}; expected "
            "1 <= profile_step_start <= profile_step_end; change one of them"
        )
    if args.profile_ranks is not None and not args.profile:
        problems.append("profile_ranks needs profile; set it to true or remove profile_ranks")
    if args.profile_ranks is not None and min(args.profile_ranks, default=-1) < 0:
        problems.append(
            f"profile_ranks is {args.profile_ranks}; expected ranks from 0; remove it for all ranks"
        )
    return problems
