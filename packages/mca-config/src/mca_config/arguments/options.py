"""The options of users with their help texts.

`_constraints` and `_training_constraints` check combinations; `distributing` and `megatron` use the values.
"""

from dataclasses import dataclass
from typing import Literal

from mca_config.arguments._option import option, switch
from mca_config.types import JsonObject


@dataclass(kw_only=True)
class DistributingOptions:
    """Parallel layout and computation of one model."""

    tensor_model_parallel_size: int | None = option("Ranks that share each weight matrix (tp).")
    pipeline_model_parallel_size: int | None = option("Ranks that share the layers (pp).")
    virtual_pipeline_model_parallel_size: int | None = option(
        "Model chunks on each pipeline rank (vpp), which shortens the pipeline bubble; needs pp of at least 2."
    )
    context_parallel_size: int | None = option("Ranks that share each sequence (cp).")
    expert_model_parallel_size: int | None = option("Ranks that share the experts of each layer (ep).")
    expert_tensor_parallel_size: int | None = option(
        "Ranks that share each expert's matrices (etp); unset: the tensor size."
    )
    pipeline_model_parallel_layout: str | None = option(
        "Layers of every pipeline stage as a string, such as Et*3|t*4|t*4L: E embedding, t decoder layer, m "
        "MTP layer, L loss, | next stage, x*n and (..)*n repeat. Fixes the virtual size."
    )
    num_layers_in_first_pipeline_stage: int | None = option(
        "Decoder layers on the first pipeline rank; the other ranks share the rest evenly."
    )
    num_layers_in_last_pipeline_stage: int | None = option(
        "Decoder layers on the last pipeline rank; the other ranks share the rest evenly."
    )
    account_for_embedding_in_pipeline_split: bool | None = switch(
        "Count the embedding as one layer of the first stage when splitting evenly."
    )
    account_for_loss_in_pipeline_split: bool | None = switch(
        "Count the output layer and loss as one layer of the last stage when splitting evenly."
    )
    sequence_parallel: bool | None = switch(
        "Sequence parallelism: split activations outside the tensor-parallel layers along the sequence. Turned on "
        "automatically when tp and ep are both above 1."
    )
    microbatch_group_size_per_vp_stage: int | None = option(
        "Micro-batches that each chunk runs in a row with virtual pipelining; unset: the pipeline size."
    )

    recompute_granularity: Literal["full", "selective"] | None = option(
        "Recompute activations in the backward pass: full = whole layers, selective = recompute_modules."
    )
    recompute_method: Literal["uniform", "block"] | None = option(
        "With full recomputation: uniform = every group of recompute_num_layers layers, block = the first "
        "recompute_num_layers layers of each chunk."
    )
    recompute_num_layers: int | None = option("With full recomputation: see recompute_method.")
    recompute_modules: list[str] | None = option(
        "With selective recomputation, any of: core_attn, moe_act, layernorm, mla_up_proj, mlp, moe, "
        "shared_experts. Unset: core_attn."
    )
    distribute_saved_activations: bool | None = switch(
        "Split saved activations over the tensor ranks with full recomputation; excludes sequence_parallel."
    )
    cpu_offloading: bool | None = switch("Move activations to host memory; excludes pp and recomputation.")
    cpu_offloading_num_layers: int | None = option("Layers whose activations move to host memory.")

    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] | None = option(
        "Dispatcher of tokens to experts; flex needs CUDA and its own communication library."
    )
    moe_expert_capacity_factor: float | None = option(
        "Capacity of an expert, as a multiple of an even share of the tokens; the rest are dropped. Unset: no limit."
    )
    moe_pad_expert_input_to_capacity: bool | None = switch(
        "Pad every expert's tokens up to its capacity; needs moe_expert_capacity_factor."
    )
    moe_token_drop_policy: Literal["probs", "position"] | None = option(
        "Which tokens are dropped first beyond capacity: the least probable, or the last."
    )
    moe_router_load_balancing_type: (
        Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"] | None
    ) = option("Load balancing of the router.")
    moe_aux_loss_coeff: float | None = option("Weight of the load-balancing loss; 0 switches it off.")
    moe_z_loss_coeff: float | None = option("Weight of the router z-loss.")
    moe_input_jitter_eps: float | None = option("Noise on the router's input: uniform in 1 - eps to 1 + eps.")
    moe_router_bias_update_rate: float | None = option(
        "Update rate of the expert bias for load balancing without an auxiliary loss."
    )
    moe_router_dtype: Literal["fp32", "fp64"] | None = option("dtype of routing; unset: fp32.")
    moe_grouped_gemm: bool | None = switch("Run all local experts in one grouped matrix product.")
    moe_permute_fusion: bool | None = switch("Fuse the reordering of tokens; needs Transformer Engine.")
    moe_router_fusion: bool | None = switch("Fuse the router's kernels; needs Transformer Engine.")
    moe_shared_expert_overlap: bool | None = switch(
        "Overlap shared experts with the dispatch of tokens; needs the alltoall dispatcher."
    )
    overlap_moe_expert_parallel_comm: bool | None = switch(
        "Overlap the token dispatch of one micro-batch with the computation of another."
    )
    mtp_num_layers: int | None = option(
        "Number of multi-token-prediction (MTP) layers; 0 drops those of the checkpoint."
    )
    mtp_loss_scaling_factor: float | None = option("Weight of the multi-token-prediction loss.")

    transformer_impl: Literal["local", "transformer_engine"] | None = option(
        "Layers of Transformer Engine or of Megatron itself; unset: Transformer Engine where it is installed."
    )
    attention_backend: Literal["flash", "fused", "unfused", "local", "auto"] | None = option(
        "Attention kernel, by Megatron's names; local is mca's own, also in Transformer Engine's layers."
    )
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] | None = option(
        "Communication of keys and values between context-parallel ranks."
    )
    attention_softmax_in_fp32: bool | None = switch("Compute the attention softmax in fp32.")
    bias_activation_fusion: bool | None = switch("Fuse bias and activation of the MLP.")
    bias_dropout_fusion: bool | None = switch("Fuse bias, dropout and residual.")
    masked_softmax_fusion: bool | None = switch("Fuse scale, mask and softmax of attention.")
    apply_rope_fusion: bool | None = switch("Fuse the rotary embedding; needs Transformer Engine.")
    gradient_accumulation_fusion: bool | None = switch(
        "Accumulate weight gradients inside the matrix product; needs a CUDA extension."
    )
    cross_entropy_loss_fusion: bool | None = switch("Fuse the cross entropy over the vocabulary shards.")
    cross_entropy_fusion_impl: Literal["native", "te"] | None = option(
        "Implementation of the fused cross entropy."
    )
    fp8: Literal["e4m3", "hybrid"] | None = option(
        "Compute matrix products in fp8; needs Transformer Engine."
    )
    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise"] | None = option(
        "Scaling recipe of fp8."
    )
    fp8_param: bool | None = switch("Keep the weights themselves in fp8; needs fp8.")
    attention_dropout: float | None = option("Dropout of attention weights.")
    hidden_dropout: float | None = option(
        "Dropout of each layer's output, and of embeddings if the model has no separate embedding dropout."
    )
    calculate_per_token_loss: bool | None = switch(
        "Average the loss over all target tokens of the global batch instead of over micro-batches."
    )
    variable_seq_lengths: bool | None = switch(
        "Let micro-batches differ in length between pipeline stages; excludes the allgather dispatcher."
    )
    overlap_p2p_comm: bool | None = switch("Overlap the pipeline's communication with computation.")
    batch_p2p_comm: bool | None = switch(
        "Batch the pipeline's sends and receives; not with overlap_p2p_comm."
    )
    tp_comm_overlap: bool | None = switch("Overlap tensor-parallel communication; needs Transformer Engine.")
    deterministic_mode: bool | None = switch("Choose kernels that give the same bits every time.")

    additional_configs: JsonObject | str | None = option(
        "Any other setting of Megatron's TransformerConfig: inline JSON, or the path of a JSON or YAML file."
    )


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
        "Keep the fp32 main parameters in the optimizer; with optimizer_cpu_offload those of offloaded parameters are "
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
        "Tokens of a micro-batch whose logits are in memory at once; logits are recomputed in the backward "
        "pass. Unset: all."
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
        "Format of the weights in training checkpoints: mca (safetensors by rank) or Megatron's torch_dist.",
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
        "Delete the checkpoints in output_dir unless this run resumes from one of them; otherwise such a run is an "
        "error.",
        default=False,
    )
