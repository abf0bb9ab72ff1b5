"""The options of the layout and the computation of a model, with their help texts.

`_constraints` checks combinations; `distributing` uses the values. `training_options` has the options of training.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args, get_type_hints

from mca_config.fields import cast
from mca_config.types import JsonObject, Typed


def option(help: str, default: Typed = None) -> Typed:
    """Return a dataclass field with a help text; None means the value of the checkpoint, or Megatron's default."""
    return field(default=default, metadata={"help": help})


def switch(help: str) -> Typed:
    """Return the field of an optional bool: ``--name`` alone means true, ``--name false`` false, absence None."""
    return field(default=None, metadata={"help": help, "nargs": "?", "const": True})


def coerce_options(args: object, cls: type) -> None:
    """Convert the fields that ``cls`` itself declares to their types, or raise an error that names the field.

    YAML reads ``1e-4`` as a string, so a string with a number is converted for a float field.
    """
    hints = get_type_hints(cls)
    for name in cls.__annotations__:
        value = getattr(args, name)
        if isinstance(value, str) and float in get_args(hints[name]):
            value = _number(value)
        setattr(args, name, cast(name, value, hints[name], words=False))


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


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
        "Layers of every pipeline stage as a string, such as Et*3|t*4|t*4L. E is the embedding, t a "
        "decoder layer, m an MTP layer, L the loss, | starts a stage, x*n and (..)*n repeat. It fixes the virtual size."
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
        "With full recomputation: uniform for every group of layers, block for the first layers of each chunk. "
        "Their number is recompute_num_layers."
    )
    recompute_num_layers: int | None = option(
        "With full recomputation: layers of a group (uniform), or of a chunk (block)."
    )
    recompute_modules: list[str] | None = option(
        "With selective recomputation: core_attn (if unset), moe_act, layernorm, mla_up_proj, mlp, moe, "
        "shared_experts."
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

    def __post_init__(self) -> None:
        """Check the values; the classes of arguments override it."""
