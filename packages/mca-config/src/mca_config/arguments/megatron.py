"""How Megatron trains and saves: what training needs beyond laying a model out."""

from dataclasses import dataclass
from typing import Any, Literal

from mca_config.arguments import _constraints
from mca_config.arguments._option import coerce_options, option, switch
from mca_config.arguments.distributing import DistributingParallelArguments

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


@dataclass(kw_only=True)
class MegatronArguments(DistributingParallelArguments):
    """Gradients, optimizer, batches and checkpoints of a training run. None: Megatron's own default."""

    use_distributed_optimizer: bool | None = switch(
        "Split the optimizer's state over the data-parallel ranks."
    )
    num_distributed_optimizer_instances: int | None = option(
        "Copies of the split optimizer state; more copies mean smaller groups and more memory."
    )
    overlap_grad_reduce: bool | None = switch("Reduce gradients while the backward pass still runs.")
    overlap_param_gather: bool | None = switch(
        "Gather updated weights while the forward pass already runs; needs use_distributed_optimizer and "
        "overlap_grad_reduce."
    )
    ddp_bucket_size: int | None = option("Parameters in one gradient bucket; unset: by data-parallel size.")
    ddp_average_in_collective: bool | None = switch("Average gradients inside the collective, not before it.")
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
        "Share of the parameters that optimizer_cpu_offload moves, 0 to 1; unset: 1."
    )
    use_torch_optimizer_for_cpu_offload: bool | None = switch(
        "Step on the host with torch's AdamW; Megatron has no other there, so false is refused."
    )
    overlap_cpu_optimizer_d2h_h2d: bool | None = switch(
        "Copy gradients to the host and weights back while other parameters step there."
    )
    pin_cpu_grads: bool | None = switch("Pin the host's copies of offloaded gradients; unset: true.")
    pin_cpu_params: bool | None = switch(
        "Pin the host's copies of offloaded weights; Megatron always does, so false is refused."
    )
    use_precision_aware_optimizer: bool | None = switch(
        "Let the optimizer hold the fp32 weights; with optimizer_cpu_offload those of offloaded parameters leave "
        "the device. Needs use_distributed_optimizer, adam, and Transformer Engine or optimizer_cpu_offload."
    )
    decoupled_lr: float | None = option(
        "Learning rate of the embedding and output layer; unset: that of the rest."
    )
    decoupled_min_lr: float | None = option(
        "Learning rate that the schedule of the embedding and output layer ends at; unset: min_lr."
    )
    min_lr: float | None = option("Learning rate that the schedule ends at.")
    loss_scale: float | None = option("Fixed loss scale of fp16; unset: dynamic.")
    initial_loss_scale: float | None = option(
        "First value of fp16's dynamic loss scale; unset: 65536, as in Hugging Face."
    )
    min_loss_scale: float | None = option("Least value of fp16's dynamic loss scale.")
    loss_scale_window: float | None = option(
        "Steps without overflow before the dynamic loss scale is doubled."
    )
    hysteresis: int | None = option("Overflows in a row before the dynamic loss scale is halved.")

    sequence_packing: bool = option(
        "Pack several sequences into one row, kept apart in attention, instead of padding each.",
        default=False,
    )
    loss_chunk_size: int | None = option(
        "Tokens of a micro-batch whose logits stand at once; the others' are computed again in the backward "
        "pass. Unset: all."
    )
    peak_tflops: float | None = option(
        "Peak TFLOP/s of one device, for the logged mfu; unset: the bf16 peak of a known GPU."
    )
    ckpt_format: Literal["mca", "torch_dist"] = option(
        "Format of the weights in training checkpoints: mca (safetensors by rank) or Megatron's torch_dist.",
        default="mca",
    )
    async_save: bool = option(
        "Write checkpoints in the background; needs ckpt_format torch_dist.", default=False
    )
    save_hf_model: bool = option("Also write every saved model as a Hugging Face checkpoint.", default=False)
    load_broadcast: bool = option(
        "Let one data-parallel replica read the weights and send them to the others.", default=False
    )
    overwrite_output_dir: bool = option(
        "Remove the checkpoints of another run in output_dir when one begins that does not resume; else it is refused.",
        default=False,
    )

    def __post_init__(self) -> None:
        coerce_options(self, MegatronArguments)
        super().__post_init__()

    def _problems(self) -> list[str]:
        return super()._problems() + _constraints.of_training(self)

    def ddp_config_overrides(self) -> dict[str, Any]:
        """What was asked for, under the names of Megatron's ``DistributedDataParallelConfig``."""
        values = {theirs: getattr(self, ours) for ours, theirs in _DDP_NAMES.items()}
        return {name: value for name, value in values.items() if value is not None}

    def optimizer_config_overrides(self) -> dict[str, Any]:
        """What was asked for, under the names of Megatron's ``OptimizerConfig``."""
        values = {name: getattr(self, name) for name in _OPTIMIZER_NAMES}
        return {name: value for name, value in values.items() if value is not None}
