"""Arguments of training and saving with Megatron, in addition to the layout: options, and contradictions among them.

`mca_config.training` adds the arguments of Hugging Face; ``mca_train`` checks the arguments against the model.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mca_config.arguments.distributing import (
    DistributingOptions,
    DistributingParallelArguments,
    coerce_options,
    option,
    switch,
)
from mca_config.types import JsonObject


@dataclass(kw_only=True)
class TrainingOptions(DistributingOptions):
    """Gradients, optimizer, batches and checkpoints of a training run."""

    use_distributed_optimizer: bool | None = switch(
        "Split the optimizer's state over the data-parallel ranks."
    )
    num_distributed_optimizer_instances: int | None = option(
        "Copies of the split optimizer state; above 1 is an error."
    )
    overlap_grad_reduce: bool | None = switch("Reduce gradients during the backward pass.")
    overlap_param_gather: bool | None = switch(
        "Gather weights during the forward pass; needs use_distributed_optimizer and overlap_grad_reduce."
    )
    ddp_bucket_size: int | None = option("Parameters in one gradient bucket; unset: by data-parallel size.")
    ddp_average_in_collective: bool | None = switch(
        "Average gradients inside the collective; true is an error."
    )
    accumulate_allreduce_grads_in_fp32: bool | None = switch(
        "Accumulate and reduce gradients in fp32; on with bf16 unless set to false."
    )
    check_for_nan_in_grad: bool | None = switch("Stop when a gradient is not finite before it is reduced.")

    optimizer: Literal["adam", "sgd", "muon"] | None = option("Optimizer; unset: adam (AdamW's decay).")
    sgd_momentum: float | None = option("Momentum of sgd; unset: none, as in Hugging Face.")
    optimizer_cpu_offload: bool | None = switch(
        "Keep optimizer state in host memory and step there; adam only."
    )
    optimizer_offload_fraction: float | None = option(
        "Share of the parameters that is offloaded, 0 to 1; unset: 1."
    )
    use_torch_optimizer_for_cpu_offload: bool | None = switch(
        "Step on the host with torch's AdamW; false is an error."
    )
    overlap_cpu_optimizer_d2h_h2d: bool | None = switch(
        "Overlap copies of gradients and weights with steps on the host."
    )
    pin_cpu_grads: bool | None = switch("Pin the host's copies of offloaded gradients; unset: true.")
    pin_cpu_params: bool | None = switch("Pin the host's copies of offloaded weights; false is an error.")
    use_precision_aware_optimizer: bool | None = switch(
        "Keep the fp32 main parameters in the optimizer. Needs use_distributed_optimizer, adam, and Transformer "
        "Engine or optimizer_cpu_offload."
    )
    decoupled_lr: float | None = option(
        "Learning rate of the embedding and output layer; unset: that of the rest."
    )
    decoupled_min_lr: float | None = option(
        "Lowest learning rate of the embedding and output layer; unset: min_lr."
    )
    min_lr: float | None = option("Lowest learning rate of the schedule.")
    loss_scale: float | None = option("Fixed loss scale of fp16; unset: dynamic.")
    initial_loss_scale: float | None = option("First value of fp16's dynamic loss scale; unset: 65536.")
    min_loss_scale: float | None = option("Smallest value of fp16's dynamic loss scale.")
    loss_scale_window: float | None = option("Steps without overflow before the scale is doubled.")
    hysteresis: int | None = option("Overflows in a row before the scale is halved.")

    freeze: list[Literal["vision", "audio", "projector", "language"]] | None = option(
        "Parts of a multimodal model that are not trained. Unset: all but language."
    )
    vision_learning_rate: float | None = option("Learning rate of the vision tower; unset: that of the rest.")
    audio_learning_rate: float | None = option("Learning rate of the audio tower; unset: that of the rest.")
    projector_learning_rate: float | None = option(
        "Learning rate of the projectors between towers and text; unset: that of the rest."
    )

    sequence_packing: bool = option(
        "Pack several sequences into one row, with separate attention.",
        default=False,
    )
    loss_chunk_size: int | None = option(
        "Tokens whose logits are in memory at once; unset: all of a micro-batch."
    )
    peak_tflops: float | None = option(
        "Peak TFLOP/s of one device, for the logged mfu; unset: the GPU's in bf16."
    )
    profile: bool = option("Record steps with torch's profiler in output_dir/profile.", default=False)
    profile_step_start: int = option("First step to profile, counted from the start of this run.", default=10)
    profile_step_end: int = option("Last step to profile.", default=12)
    profile_ranks: list[int] | None = option("Ranks to profile; unset: all.")
    ckpt_format: Literal["mca", "torch_dist"] = option(
        "Format of weights in checkpoints: mca (safetensors by rank) or Megatron's torch_dist.",
        default="mca",
    )
    async_save: bool = option(
        "Write checkpoints in the background; needs ckpt_format torch_dist.", default=False
    )
    save_hf_model: bool = option("Also write every saved model as a Hugging Face checkpoint.", default=False)
    load_broadcast: bool = option(
        "One data-parallel replica reads the weights and sends them to the others.", default=False
    )
    overwrite_output_dir: bool = option(
        "Delete the checkpoints in output_dir unless this run resumes from one of them.",
        default=False,
    )


def training_problems(args: TrainingOptions) -> list[str]:
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


def _overlap(args: TrainingOptions) -> Iterator[str]:
    missing = [
        name for name in ("use_distributed_optimizer", "overlap_grad_reduce") if not getattr(args, name)
    ]
    if args.overlap_param_gather and missing:
        yield (
            f"overlap_param_gather needs {' and '.join(missing)}; set to true, or remove overlap_param_gather"
        )
    if args.ddp_average_in_collective:
        yield "ddp_average_in_collective excludes calculate_per_token_loss, which is always on; remove it"
    if args.num_distributed_optimizer_instances not in (None, 1):
        yield (
            f"num_distributed_optimizer_instances {args.num_distributed_optimizer_instances} is not supported: the "
            "state is split over all data-parallel ranks; remove it"
        )
    if args.overlap_moe_expert_parallel_comm:
        yield (
            "overlap_moe_expert_parallel_comm is not supported in training, which does not use Megatron's schedule "
            "plans; remove it"
        )
    if args.ddp_bucket_size is not None and not args.overlap_grad_reduce:
        yield (
            "ddp_bucket_size needs overlap_grad_reduce, without which there is one bucket; add it or remove "
            "ddp_bucket_size"
        )
    if args.ddp_bucket_size is not None and args.ddp_bucket_size < 1:
        yield f"ddp_bucket_size must be at least 1 parameter, not {args.ddp_bucket_size}"


def _optimizer(args: TrainingOptions) -> Iterator[str]:
    if args.optimizer == "muon" and (args.use_distributed_optimizer or args.overlap_param_gather):
        yield (
            "optimizer muon excludes use_distributed_optimizer and overlap_param_gather; remove them or use adam"
        )
    if args.optimizer == "sgd" and args.use_distributed_optimizer:
        yield (
            "optimizer sgd excludes use_distributed_optimizer, which splits Adam's state only; remove one of the two"
        )
    if args.sgd_momentum is not None and args.optimizer != "sgd":
        yield "sgd_momentum needs optimizer sgd; set it or remove sgd_momentum"
    if args.use_precision_aware_optimizer and not (
        args.use_distributed_optimizer and args.optimizer in (None, "adam")
    ):
        yield (
            "use_precision_aware_optimizer needs use_distributed_optimizer and optimizer adam; set them or "
            "remove it"
        )


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


def _offload(args: TrainingOptions) -> Iterator[str]:
    fraction = args.optimizer_offload_fraction
    if fraction is not None and not 0 <= fraction <= 1:
        yield f"optimizer_offload_fraction must be between 0 and 1, not {fraction}"
    if fraction is not None and not args.optimizer_cpu_offload:
        yield "optimizer_offload_fraction needs optimizer_cpu_offload; add it or remove the fraction"
    details = [name for name in _OFFLOAD_DETAILS if getattr(args, name)]
    if details and not args.optimizer_cpu_offload:
        yield f"{' and '.join(details)} needs optimizer_cpu_offload; add it or remove {details[0]}"
    if args.optimizer_cpu_offload and args.optimizer not in (None, "adam"):
        yield f"optimizer_cpu_offload needs optimizer adam, not {args.optimizer}; remove one of the two"
    if args.use_torch_optimizer_for_cpu_offload is False:
        yield (
            "use_torch_optimizer_for_cpu_offload cannot be false: Megatron has no other optimizer on the host; "
            "remove it"
        )
    if args.pin_cpu_params is False:
        yield "pin_cpu_params cannot be false: Megatron always pins the weights on the host; remove it"


def _loss(args: TrainingOptions) -> Iterator[str]:
    size = args.loss_chunk_size
    if size is not None and size < 1:
        yield f"loss_chunk_size must be at least 1 token, not {size}"
    if args.calculate_per_token_loss is False:
        yield (
            "calculate_per_token_loss cannot be false: the loss is the mean over all target tokens of the global "
            "batch; remove it"
        )


def _saving(args: TrainingOptions) -> list[str]:
    if args.async_save and args.ckpt_format != "torch_dist":
        return [
            f"async_save needs ckpt_format torch_dist, not {args.ckpt_format}; change it or remove async_save"
        ]
    return []


def _profile(args: TrainingOptions) -> Iterator[str]:
    if not 1 <= args.profile_step_start <= args.profile_step_end:
        yield (
            f"profile_step_start is {args.profile_step_start} and profile_step_end {args.profile_step_end}; expected "
            "1 <= profile_step_start <= profile_step_end; change one of them"
        )
    if args.profile_ranks is not None and not args.profile:
        yield "profile_ranks needs profile; set it to true or remove profile_ranks"
    if args.profile_ranks is not None and min(args.profile_ranks, default=-1) < 0:
        yield f"profile_ranks is {args.profile_ranks}; expected ranks from 0; remove it for all ranks"


_DDP_NAMES = {
    "use_distributed_optimizer": "use_distributed_optimizer",
    "overlap_grad_reduce": "overlap_grad_reduce",
    "overlap_param_gather": "overlap_param_gather",
    "ddp_bucket_size": "bucket_size",
    "ddp_average_in_collective": "average_in_collective",
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "check_for_nan_in_grad": "check_for_nan_in_grad",
    "num_distributed_optimizer_instances": "num_distributed_optimizer_instances",
}
_OPTIMIZER_NAMES = (
    "optimizer",
    "use_distributed_optimizer",
    "overlap_param_gather",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "use_torch_optimizer_for_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
    "pin_cpu_grads",
    "pin_cpu_params",
    "use_precision_aware_optimizer",
    "sgd_momentum",
    "decoupled_lr",
    "decoupled_min_lr",
    "min_lr",
    "loss_scale",
    "initial_loss_scale",
    "min_loss_scale",
    "loss_scale_window",
    "hysteresis",
)


class MegatronArguments(DistributingParallelArguments, TrainingOptions):
    """Gradients, optimizer, batches and checkpoints of a training run. None: Megatron's own default."""

    def __post_init__(self) -> None:
        coerce_options(self, TrainingOptions)
        super().__post_init__()

    def _problems(self) -> list[str]:
        return super()._problems() + training_problems(self)

    def ddp_config_overrides(self) -> JsonObject:
        """Return all set values, under the names of Megatron's ``DistributedDataParallelConfig``."""
        values = {megatron_name: getattr(self, name) for name, megatron_name in _DDP_NAMES.items()}
        return {name: value for name, value in values.items() if value is not None}

    def optimizer_config_overrides(self) -> JsonObject:
        """Return all set values, under the names of Megatron's ``OptimizerConfig``."""
        values = {name: getattr(self, name) for name in _OPTIMIZER_NAMES}
        return {name: value for name, value in values.items() if value is not None}
