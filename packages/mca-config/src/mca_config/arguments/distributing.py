"""Arguments of the parallel layout and the computation of a model, for loading and converting.

`DistributingOptions` declares them with their help texts; contradictions among them are below. `megatron` adds the
arguments of training. `mca_config.checks` checks a model against a layout.
"""

import dataclasses
import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from mca_config.arguments import _additional
from mca_config.errors import McaError, raise_problems
from mca_config.fields import cast, type_hints
from mca_config.layout import ParallelLayout, RankGrid
from mca_config.types import JsonObject, Typed, Values

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
    hints = type_hints(cls)
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
        "Model chunks on each pipeline rank (vpp); shortens the pipeline bubble, needs pp above 1."
    )
    context_parallel_size: int | None = option("Ranks that share each sequence (cp).")
    expert_model_parallel_size: int | None = option("Ranks that share the experts of each layer (ep).")
    expert_tensor_parallel_size: int | None = option(
        "Ranks that share each expert's matrices (etp); unset: tp."
    )
    pipeline_model_parallel_layout: str | None = option(
        "Layers of every pipeline stage as a string, such as Et*3|t*4|t*4L."
    )
    num_layers_in_first_pipeline_stage: int | None = option(
        "Decoder layers on the first pipeline rank; the others share the rest."
    )
    num_layers_in_last_pipeline_stage: int | None = option(
        "Decoder layers on the last pipeline rank; the others share the rest."
    )
    account_for_embedding_in_pipeline_split: bool | None = switch(
        "Count the embedding as one layer of the first stage."
    )
    account_for_loss_in_pipeline_split: bool | None = switch(
        "Count output layer and loss as one layer of the last stage."
    )
    sequence_parallel: bool | None = switch(
        "Split activations outside the tensor-parallel layers along the sequence. On if tp and ep are above 1."
    )
    microbatch_group_size_per_vp_stage: int | None = option(
        "With vpp, micro-batches that a chunk runs in a row; unset: pp."
    )

    recompute_granularity: Literal["full", "selective"] | None = option(
        "Recompute activations in the backward pass: full = whole layers, selective = recompute_modules."
    )
    recompute_method: Literal["uniform", "block"] | None = option(
        "With full recomputation: uniform for every group of layers, block for the first layers of each chunk."
    )
    recompute_num_layers: int | None = option(
        "With full recomputation: layers of a group (uniform) or chunk (block)."
    )
    recompute_modules: list[str] | None = option(
        "With selective recomputation: core_attn (if unset), moe_act, layernorm, mla_up_proj, mlp, moe, shared_experts."
    )
    distribute_saved_activations: bool | None = switch(
        "With full recomputation: split saved activations over tp; excludes sequence_parallel."
    )
    cpu_offloading: bool | None = switch("Move activations to host memory; excludes pp and recomputation.")
    cpu_offloading_num_layers: int | None = option("Layers whose activations move to host memory.")

    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] | None = option(
        "Dispatcher of tokens to experts; flex needs CUDA and its communication library."
    )
    moe_expert_capacity_factor: float | None = option(
        "Most tokens of an expert, as a multiple of an even share; the rest are dropped. Unset: no limit."
    )
    moe_pad_expert_input_to_capacity: bool | None = switch("Pad every expert's tokens up to its capacity.")
    moe_token_drop_policy: Literal["probs", "position"] | None = option(
        "Tokens that are dropped first beyond capacity: the least probable, or the last."
    )
    moe_router_load_balancing_type: (
        Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"] | None
    ) = option("Load balancing of the router.")
    moe_aux_loss_coeff: float | None = option("Weight of the load-balancing loss; 0 switches it off.")
    moe_z_loss_coeff: float | None = option("Weight of the router z-loss.")
    moe_input_jitter_eps: float | None = option("Noise on the router's input: uniform in 1 - eps to 1 + eps.")
    moe_router_bias_update_rate: float | None = option(
        "Update rate of expert biases (load balancing without an auxiliary loss)."
    )
    moe_router_dtype: Literal["fp32", "fp64"] | None = option("dtype of routing; unset: fp32.")
    moe_grouped_gemm: bool | None = switch("Run all local experts in one grouped matrix product.")
    moe_permute_fusion: bool | None = switch("Fuse the reordering of tokens; needs Transformer Engine.")
    moe_router_fusion: bool | None = switch("Fuse the router's kernels; needs Transformer Engine.")
    moe_shared_expert_overlap: bool | None = switch(
        "Overlap shared experts with the dispatch of tokens; needs the alltoall dispatcher."
    )
    overlap_moe_expert_parallel_comm: bool | None = switch(
        "Overlap token dispatch with another micro-batch; an error in training."
    )
    mtp_num_layers: int | None = option(
        "Multi-token-prediction (MTP) layers; 0 drops those of the checkpoint."
    )
    mtp_loss_scaling_factor: float | None = option("Weight of the multi-token-prediction loss.")

    transformer_impl: Literal["local", "transformer_engine"] | None = option(
        "Layers of Megatron itself or of Transformer Engine; unset: the latter where it is installed."
    )
    attention_backend: Literal["flash", "fused", "unfused", "local", "auto"] | None = option(
        "Attention kernel; local is mca's own, also in Transformer Engine's layers."
    )
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] | None = option(
        "Exchange of keys and values between context-parallel ranks."
    )
    attention_softmax_in_fp32: bool | None = switch("Compute the attention softmax in fp32.")
    bias_activation_fusion: bool | None = switch("Fuse bias and activation of the MLP.")
    bias_dropout_fusion: bool | None = switch("Fuse bias, dropout and residual.")
    masked_softmax_fusion: bool | None = switch("Fuse scale, mask and softmax of attention.")
    apply_rope_fusion: bool | None = switch("Fuse the rotary embedding; needs Transformer Engine.")
    gradient_accumulation_fusion: bool | None = switch(
        "Accumulate weight gradients in the matrix product; needs a CUDA extension."
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
    fp8_param: bool | None = switch("Keep the weights themselves in fp8; true is an error.")
    attention_dropout: float | None = option("Dropout of attention weights.")
    hidden_dropout: float | None = option(
        "Dropout of each layer's output, and of embeddings without their own."
    )
    calculate_per_token_loss: bool | None = switch(
        "Average the loss over all targets of the global batch; false is an error in training."
    )
    variable_seq_lengths: bool | None = switch(
        "Let micro-batches differ in length between pipeline stages; excludes the allgather dispatcher."
    )
    overlap_p2p_comm: bool | None = switch("Overlap the pipeline's communication with computation.")
    batch_p2p_comm: bool | None = switch(
        "Batch the pipeline's sends and receives; not with overlap_p2p_comm."
    )
    tp_comm_overlap: bool | None = switch("Overlap tensor-parallel communication; true is an error.")
    deterministic_mode: bool | None = switch("Choose kernels that give the same bits every time.")

    additional_configs: JsonObject | str | None = option(
        "Any other setting of Megatron's TransformerConfig: a mapping, or the path of a JSON or YAML file."
    )

    def __post_init__(self) -> None:
        """Check the values; the classes of arguments override it."""


RECOMPUTE_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
SEQUENCE_PARALLEL_OFF = (
    "sequence_parallel cannot be off while tensor_model_parallel_size and expert_model_parallel_size are both "
    "above 1; remove sequence_parallel, or set expert_model_parallel_size to 1"
)


class DistributingParallelArguments(DistributingOptions):
    """Parallel layout and computation of one model. None: the value of the checkpoint, else Megatron's default."""

    def __post_init__(self) -> None:
        self.additional_configs = _additional.read(self.additional_configs)
        _additional.move_to_arguments(self, self.additional_configs)
        coerce_options(self, DistributingOptions)
        raise_problems(self._problems(), "arguments")
        sizes = (self.tensor_model_parallel_size, self.expert_model_parallel_size)
        if self.sequence_parallel is None and all((size or 1) > 1 for size in sizes):
            _log_sequence_parallel()
            self.sequence_parallel = True

    def _problems(self) -> list[str]:
        """Return all contradictions among the arguments; subclasses add theirs."""
        return option_problems(self) + self._layout_problems()

    def _layout_problems(self) -> list[str]:
        """Return the problems of the layout that do not depend on the checkpoint."""
        sizes = {name: getattr(self, name) for name in LAYOUT_FIELDS if getattr(self, name) is not None}
        if "pipeline_model_parallel_size" not in sizes:
            sizes = {name: value for name, value in sizes.items() if name not in _SPLIT_FIELDS}
        try:
            ParallelLayout(**sizes)
        except McaError as error:
            return [str(error)]
        return []

    def layout(self, base: ParallelLayout | None = None) -> ParallelLayout:
        """Return the requested layout; sizes that are None come from ``base`` (a checkpoint's layout).

        The fields of the pipeline split (virtual size, layout string, uneven stages) belong together: they come
        from ``base`` only if the pipeline size is the same and none of them is set.
        """
        base = base or ParallelLayout()
        sizes = {name: getattr(self, name) for name in LAYOUT_FIELDS if getattr(self, name) is not None}
        inherited = {name: getattr(base, name) for name in LAYOUT_FIELDS}
        same_pipeline = sizes.get("pipeline_model_parallel_size", base.pp) == base.pp
        if not same_pipeline or any(name in sizes for name in _SPLIT_FIELDS):
            inherited = {name: value for name, value in inherited.items() if name not in _SPLIT_FIELDS}
        if base.expert_tensor_parallel_size is None:
            inherited["expert_tensor_parallel_size"] = None
        return ParallelLayout(**(inherited | sizes))

    def grid(self, world_size: int, base: ParallelLayout | None = None) -> RankGrid:
        """Return the grid of ``world_size`` ranks with :meth:`layout`."""
        return RankGrid(self.layout(base), world_size)

    def sequence_parallel_for(self, layout: ParallelLayout) -> bool:
        """Return whether sequence parallelism is on at ``layout``: as requested, else if both tp and ep are above 1."""
        if self.sequence_parallel and layout.tp == 1:
            raise McaError(
                "sequence_parallel needs tensor_model_parallel_size of at least 2; remove sequence_parallel"
            )
        both = layout.tp > 1 and layout.ep > 1
        if both and self.sequence_parallel is False:
            raise McaError(SEQUENCE_PARALLEL_OFF)
        if both and self.sequence_parallel is None:
            _log_sequence_parallel()
        return both if self.sequence_parallel is None else self.sequence_parallel

    def transformer_config_overrides(self) -> JsonObject:
        """Return all set arguments except the layout, under the names of Megatron's ``TransformerConfig``."""
        names = DistributingOptions.__annotations__.keys() - {*LAYOUT_FIELDS, "additional_configs"}
        values = {name: getattr(self, name) for name in sorted(names) if getattr(self, name) is not None}
        extra = self.additional_configs if isinstance(self.additional_configs, dict) else {}
        return values | extra


def _log_sequence_parallel() -> None:
    if _logger.isEnabledFor(logging.INFO):  # a check before logging is set up must not use the one message
        _log_sequence_parallel_once()


@functools.cache
def _log_sequence_parallel_once() -> None:
    _logger.info("sequence_parallel is on: tensor and expert parallelism together need it")


def option_problems(args: DistributingOptions) -> list[str]:
    """Return the contradictions among the arguments of `DistributingOptions`."""
    extra = args.additional_configs if isinstance(args.additional_configs, dict) else {}
    return [
        *_sequence(args),
        *_recompute(args),
        *_experts(args),
        *_precision(args),
        *_ranges(args),
        *_additional.setting_problems(extra, vars(args)),
    ]


def _sequence(args: DistributingOptions) -> Iterator[str]:
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        yield (
            "sequence_parallel needs tensor_model_parallel_size of at least 2; remove sequence_parallel or "
            "raise the size"
        )
    both = (args.tensor_model_parallel_size or 1) > 1 and (args.expert_model_parallel_size or 1) > 1
    if args.sequence_parallel is False and both:
        yield SEQUENCE_PARALLEL_OFF
    if args.sequence_parallel and args.distribute_saved_activations:
        yield "distribute_saved_activations excludes sequence_parallel; remove one of the two"
    if args.overlap_p2p_comm and args.batch_p2p_comm:
        yield "overlap_p2p_comm excludes batch_p2p_comm; remove one of the two"


def _recompute(args: DistributingOptions) -> Iterator[str]:
    kind = args.recompute_granularity
    if kind == "full" and (args.recompute_method is None or args.recompute_num_layers is None):
        yield (
            "recompute_granularity full needs recompute_method (uniform or block) and recompute_num_layers; "
            "add them"
        )
    if kind != "full":
        full_only = [
            name for name in ("recompute_method", "recompute_num_layers") if getattr(args, name) is not None
        ]
        if full_only:
            yield (
                f"{' and '.join(full_only)} needs recompute_granularity full; add it or remove {full_only[0]}"
            )
    if args.recompute_modules is not None and kind != "selective":
        yield "recompute_modules needs recompute_granularity selective; add it or remove the modules"
    unknown = [name for name in args.recompute_modules or () if name not in RECOMPUTE_MODULES]
    if unknown:
        yield f"recompute_modules: {', '.join(unknown)} is none of {', '.join(RECOMPUTE_MODULES)}"
    if args.distribute_saved_activations and kind != "full":
        yield (
            "distribute_saved_activations needs recompute_granularity full; add it or remove "
            "distribute_saved_activations"
        )
    if args.cpu_offloading_num_layers and not args.cpu_offloading:
        yield "cpu_offloading_num_layers needs cpu_offloading; add it or remove cpu_offloading_num_layers"
    if args.cpu_offloading and (kind is not None or (args.pipeline_model_parallel_size or 1) > 1):
        yield (
            "cpu_offloading excludes recompute_granularity and pipeline_model_parallel_size above 1; remove it"
        )


def _experts(args: DistributingOptions) -> Iterator[str]:
    dispatcher = args.moe_token_dispatcher_type
    if args.variable_seq_lengths and dispatcher == "allgather":
        yield (
            "variable_seq_lengths excludes moe_token_dispatcher_type allgather; use alltoall or remove "
            "variable_seq_lengths"
        )
    if args.moe_pad_expert_input_to_capacity and args.moe_expert_capacity_factor is None:
        yield (
            "moe_pad_expert_input_to_capacity needs moe_expert_capacity_factor; add it (1.0 is an even share)"
        )
    if args.moe_token_drop_policy is not None and args.moe_expert_capacity_factor is None:
        yield (
            "moe_token_drop_policy needs moe_expert_capacity_factor, without which no token is dropped; add it or "
            "remove moe_token_drop_policy"
        )
    if args.moe_expert_capacity_factor is not None and args.moe_router_load_balancing_type == "sinkhorn":
        yield (
            "moe_expert_capacity_factor excludes moe_router_load_balancing_type sinkhorn; use aux_loss or none"
        )
    if args.moe_shared_expert_overlap and dispatcher not in (None, "alltoall"):
        yield (
            f"moe_shared_expert_overlap needs moe_token_dispatcher_type alltoall, not {dispatcher}; change it "
            "or remove the overlap"
        )
    if args.overlap_moe_expert_parallel_comm:
        yield from _expert_overlap(args)


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


def _ranges(args: DistributingOptions) -> Iterator[str]:
    for names, least in ((_AT_LEAST_ZERO, 0), (_AT_LEAST_ONE, 1)):
        for name in names:
            value = getattr(args, name)
            if value is not None and value < least:
                yield f"{name} must be at least {least}, not {value}"
    for name in ("attention_dropout", "hidden_dropout"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < 1:
            yield f"{name} must be at least 0 and below 1, not {value}"
    factor = args.moe_expert_capacity_factor
    if factor is not None and factor <= 0:
        yield f"moe_expert_capacity_factor must be above 0, not {factor}; remove it for no limit"
