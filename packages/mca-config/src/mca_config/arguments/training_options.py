"""The options of training runs with their help texts.

`_training_constraints` checks their combinations; `megatron` uses the values.
"""

from dataclasses import dataclass
from typing import Literal

from mca_config.arguments.options import DistributingOptions, option, switch


@dataclass(kw_only=True)
class TrainingOptions(DistributingOptions):
    """Gradients, optimizer, batches and checkpoints of a training run."""

    use_distributed_optimizer: bool | None = switch(
        "Split the optimizer's state over the data-parallel ranks."
    )
    num_distributed_optimizer_instances: int | None = option(
        "Copies of the split optimizer state; more copies mean smaller groups and more memory."
    )
    overlap_grad_reduce: bool | None = switch("Reduce gradients while the backward pass still runs.")
    overlap_param_gather: bool | None = switch(
        "Gather updated weights while the forward pass already runs. Needs use_distributed_optimizer and "
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
        "Step on the host with torch's AdamW, the only optimizer that Megatron has there; false is an error."
    )
    overlap_cpu_optimizer_d2h_h2d: bool | None = switch(
        "Copy gradients to the host and weights back while other parameters step there."
    )
    pin_cpu_grads: bool | None = switch("Pin the host's copies of offloaded gradients; unset: true.")
    pin_cpu_params: bool | None = switch(
        "Pin the host's copies of offloaded weights; Megatron always does, false is an error."
    )
    use_precision_aware_optimizer: bool | None = switch(
        "Keep the fp32 main parameters in the optimizer. With optimizer_cpu_offload those of offloaded parameters are "
        "in host memory. Needs use_distributed_optimizer, adam, and Transformer Engine or optimizer_cpu_offload."
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
    min_loss_scale: float | None = option("Smallest value of fp16's dynamic loss scale.")
    loss_scale_window: float | None = option(
        "Steps without overflow before the dynamic loss scale is doubled."
    )
    hysteresis: int | None = option("Overflows in a row before the dynamic loss scale is halved.")

    freeze: list[Literal["vision", "audio", "projector", "language"]] | None = option(
        "Parts of a multimodal model that are not trained. Unset: all but language."
    )
    vision_learning_rate: float | None = option("Learning rate of the vision tower; unset: that of the rest.")
    audio_learning_rate: float | None = option("Learning rate of the audio tower; unset: that of the rest.")
    projector_learning_rate: float | None = option(
        "Learning rate of the projectors between towers and text; unset: that of the rest."
    )

    sequence_packing: bool = option(
        "Pack several sequences into one row, with separate attention, instead of padding each.",
        default=False,
    )
    loss_chunk_size: int | None = option(
        "Tokens of a micro-batch whose logits are in memory at once; unset: all. Logits are recomputed in the "
        "backward pass."
    )
    peak_tflops: float | None = option(
        "Peak TFLOP/s of one device, for the logged mfu; unset: the bf16 peak of a known GPU."
    )
    profile: bool = option(
        "Record some steps with torch's profiler, for each rank, in output_dir/profile.", default=False
    )
    profile_step_start: int = option("First step to profile, counted from the start of this run.", default=10)
    profile_step_end: int = option("Last step to profile.", default=12)
    profile_ranks: list[int] | None = option("Ranks to profile; unset: all.")
    ckpt_format: Literal["mca", "torch_dist"] = option(
        "Format of weights in training checkpoints: mca (safetensors by rank) or Megatron's torch_dist.",
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
        "Delete the checkpoints in output_dir unless this run resumes from one of them. Without it such a run is an "
        "error.",
        default=False,
    )
