"""How a model is laid over the ranks and computed: the arguments that loading and converting need."""

import dataclasses
import functools
import logging
from dataclasses import dataclass
from typing import Any, Literal

from mca_config.arguments import _additional, _constraints
from mca_config.arguments._option import coerce_options, option, switch
from mca_config.errors import McaError, list_problems
from mca_config.layout import ParallelLayout, RankGrid

_logger = logging.getLogger(__name__)

LAYOUT_FIELDS = tuple(field.name for field in dataclasses.fields(ParallelLayout))
_SPLIT_FIELDS = (
    "virtual_pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


@dataclass(kw_only=True)
class DistributingParallelArguments:
    """Parallel layout and computation of one model. None: what the checkpoint, else Megatron, says."""

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
        "multi-token-prediction layer, L loss, | next stage, x*n and (..)*n repeat. Fixes the virtual size."
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
        "Cut activations outside the tensor-parallel matrices along the sequence. Turned on by itself when "
        "tp and ep are both above 1."
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
        "How tokens travel to their experts; flex needs CUDA and its own communication library."
    )
    moe_expert_capacity_factor: float | None = option(
        "Tokens that an expert takes, as a multiple of an even share; the rest are dropped. Unset: no limit."
    )
    moe_pad_expert_input_to_capacity: bool | None = switch(
        "Pad every expert's tokens up to its capacity; needs moe_expert_capacity_factor."
    )
    moe_token_drop_policy: Literal["probs", "position"] | None = option(
        "Which tokens go first beyond capacity: the least probable, or the last."
    )
    moe_router_load_balancing_type: (
        Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"] | None
    ) = option("How the router is kept balanced.")
    moe_aux_loss_coeff: float | None = option("Weight of the load-balancing loss; 0 switches it off.")
    moe_z_loss_coeff: float | None = option("Weight of the router z-loss.")
    moe_input_jitter_eps: float | None = option("Noise on the router's input: uniform in 1 - eps to 1 + eps.")
    moe_router_bias_update_rate: float | None = option(
        "Step of the expert bias that balances without a loss."
    )
    moe_router_dtype: Literal["fp32", "fp64"] | None = option("dtype of routing; unset: that of the model.")
    moe_grouped_gemm: bool | None = switch("Run all local experts in one grouped matrix product.")
    moe_permute_fusion: bool | None = switch("Fuse the reordering of tokens; needs Transformer Engine.")
    moe_router_fusion: bool | None = switch("Fuse the router's kernels; needs Transformer Engine.")
    moe_shared_expert_overlap: bool | None = switch(
        "Run shared experts while tokens travel; needs the alltoall dispatcher."
    )
    overlap_moe_expert_parallel_comm: bool | None = switch(
        "Overlap one micro-batch's token travel with another's computation."
    )
    mtp_num_layers: int | None = option(
        "Multi-token-prediction layers; 0 leaves those of the checkpoint out."
    )
    mtp_loss_scaling_factor: float | None = option("Weight of the multi-token-prediction loss.")

    transformer_impl: Literal["local", "transformer_engine"] | None = option(
        "Layers of Transformer Engine or of Megatron itself; unset: Transformer Engine where it is installed."
    )
    attention_backend: Literal["flash", "fused", "unfused", "local", "auto"] | None = option(
        "Attention kernel, by Megatron's names; local is mca's own, also in Transformer Engine's layers."
    )
    cp_comm_type: Literal["p2p", "all_gather", "a2a", "a2a+p2p"] | None = option(
        "How keys and values travel between context-parallel ranks."
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
    cross_entropy_fusion_impl: Literal["native", "te"] | None = option("Whose fused cross entropy.")
    fp8: Literal["e4m3", "hybrid"] | None = option(
        "Compute matrix products in fp8; needs Transformer Engine."
    )
    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise"] | None = option("How fp8 is scaled.")
    fp8_param: bool | None = switch("Keep the weights themselves in fp8; needs fp8.")
    attention_dropout: float | None = option("Dropout of attention weights.")
    hidden_dropout: float | None = option("Dropout of each layer's output.")
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

    additional_configs: dict[str, Any] | str | None = option(
        "Any other setting of Megatron's TransformerConfig: inline JSON, or the path of a JSON or YAML file."
    )

    def __post_init__(self) -> None:
        self.additional_configs = _additional.read(self.additional_configs)
        _additional.move_to_arguments(self, self.additional_configs)
        coerce_options(self, DistributingParallelArguments)
        error = list_problems(self._problems(), "arguments")
        if error:
            raise error
        if self.sequence_parallel is None and (self.tensor_model_parallel_size or 1) > 1 and self._has_ep():
            _say_sequence_parallel_on()
            self.sequence_parallel = True

    def _problems(self) -> list[str]:
        """Every contradiction among the arguments; the levels above add theirs."""
        return _constraints.of_distribution(self) + self._layout_problems()

    def _layout_problems(self) -> list[str]:
        """What is wrong with the layout whatever the checkpoint says."""
        given = {name: getattr(self, name) for name in LAYOUT_FIELDS if getattr(self, name) is not None}
        if "pipeline_model_parallel_size" not in given:
            given = {name: value for name, value in given.items() if name not in _SPLIT_FIELDS}
        try:
            ParallelLayout(**given)
        except McaError as error:
            return [str(error)]
        return []

    def _has_ep(self) -> bool:
        return (self.expert_model_parallel_size or 1) > 1

    def layout(self, base: ParallelLayout | None = None) -> ParallelLayout:
        """The parallel sizes asked for; those left at None come from ``base`` (a checkpoint's layout).

        How the pipeline is split (virtual size, layout string, uneven stages) is one choice: it comes
        from ``base`` only if the pipeline size stays the same and nothing of the split is given.
        """
        base = base or ParallelLayout()
        given = {name: getattr(self, name) for name in LAYOUT_FIELDS if getattr(self, name) is not None}
        inherited = {name: getattr(base, name) for name in LAYOUT_FIELDS}
        same_pipeline = given.get("pipeline_model_parallel_size", base.pp) == base.pp
        if not same_pipeline or any(name in given for name in _SPLIT_FIELDS):
            inherited = {name: value for name, value in inherited.items() if name not in _SPLIT_FIELDS}
        if base.etp == base.tp:
            inherited["expert_tensor_parallel_size"] = None
        return ParallelLayout(**(inherited | given))

    def adopt_layout(self, base: ParallelLayout) -> ParallelLayout:
        """Writes :meth:`layout` of ``base`` into the arguments, so that none of the sizes stays None."""
        layout = self.layout(base)
        for name in LAYOUT_FIELDS:
            setattr(self, name, getattr(layout, name))
        return layout

    def grid(self, world_size: int, base: ParallelLayout | None = None) -> RankGrid:
        """The ranks of ``world_size`` processes laid out as :meth:`layout` says."""
        return RankGrid(self.layout(base), world_size)

    def sequence_parallel_for(self, layout: ParallelLayout) -> bool:
        """Whether activations are cut along the sequence at ``layout``: as asked, else with both tp and ep."""
        if self.sequence_parallel and layout.tp == 1:
            raise McaError(
                "sequence_parallel needs tensor_model_parallel_size of at least 2; remove sequence_parallel"
            )
        both = layout.tp > 1 and layout.ep > 1
        if both and self.sequence_parallel is False:
            raise McaError(_constraints.SEQUENCE_PARALLEL_OFF)
        if both and self.sequence_parallel is None:
            _say_sequence_parallel_on()
        return both if self.sequence_parallel is None else self.sequence_parallel

    def transformer_config_overrides(self) -> dict[str, Any]:
        """All that was asked for beyond the layout, under the names of Megatron's ``TransformerConfig``."""
        names = DistributingParallelArguments.__annotations__.keys() - {*LAYOUT_FIELDS, "additional_configs"}
        given = {name: getattr(self, name) for name in sorted(names) if getattr(self, name) is not None}
        extra = self.additional_configs if isinstance(self.additional_configs, dict) else {}
        return given | extra


@functools.cache
def _say_sequence_parallel_on() -> None:
    _logger.info("sequence_parallel is on: tensor and expert parallelism together need it")
