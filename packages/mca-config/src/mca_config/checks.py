"""Checks of a model against a parallel layout; they need no process group and no device.

Limits of the installed megatron-core are in `mca_models.megatron.factory.limits`.
"""

import math
from collections.abc import Callable

from mca_config.errors import McaError, raise_problems
from mca_config.layout import ParallelLayout, RankGrid
from mca_config.model_config import McaModelConfig
from mca_config.pipeline import pipeline_plan
from mca_config.printable import counted


def check_layout(
    model: McaModelConfig,
    layout: ParallelLayout,
    world_size: int | None = None,
    seq_length: int | None = None,
    *,
    sequence_parallel: bool | None = None,
) -> list[str]:
    """Return all reasons why ``model`` cannot be distributed as ``layout`` says; empty if it can.

    The vocabulary size always fits, because it is padded. ``model.layout`` is ignored.

    Args:
        model: The architecture.
        layout: The parallel sizes to check.
        world_size: Number of processes, if known.
        seq_length: Tokens in a sequence, if known.
        sequence_parallel: None: on if both tensor and expert parallelism are, as Megatron requires.
    """
    heads = dict.fromkeys(problem for kind in model.kinds() for problem in _heads(kind, layout))
    problems = [*_layers(model, layout), *_pairs(model, layout), *heads, *_dense_mlp(model, layout)]
    problems += [*_mtp(model, layout), *_experts(model, layout)]
    problems += _one_stage(model, layout) if not _layers(model, layout) else []
    if world_size is not None:
        problems += _caught_messages(lambda: RankGrid(layout, world_size))
    if seq_length is not None:
        problems += _sequence(layout, seq_length, sequence_parallel)
    return problems


def require_layout(
    model: McaModelConfig,
    layout: ParallelLayout,
    world_size: int | None = None,
    seq_length: int | None = None,
    *,
    sequence_parallel: bool | None = None,
) -> None:
    """Raise one :class:`McaError` with all problems that :func:`check_layout` returns."""
    problems = check_layout(model, layout, world_size, seq_length, sequence_parallel=sequence_parallel)
    raise_problems(problems, f"{model.model_type} cannot be laid out as {layout}")


def sequence_multiple(
    layout: ParallelLayout, sequence_parallel: bool | None = None, *, tokens: int = 1, step: int = 1
) -> int:
    """Return the number that divides every sequence length: two slices per context-parallel rank, each split over tp.

    Args:
        layout: The parallel sizes.
        sequence_parallel: None: on if both tensor and expert parallelism are.
        tokens: Required multiple of the tokens of one rank (`fp8_token_multiple`).
        step: Further required multiple of a sequence (`length_multiple`).
    """
    slices = 2 if layout.cp > 1 else 1
    cut = layout.tp if _is_sequence_parallel(layout, sequence_parallel) else 1
    return math.lcm(layout.cp * math.lcm(slices, cut * tokens), step)


def length_multiple(device: str, implementation: str | None, *, packed: bool) -> int:
    """Return the multiple to which rows are padded, so that few lengths occur.

    Attention of Transformer Engine on a GPU makes a cuDNN plan for each new length, which takes 0.1 to 1 second
    according to reports of its users. Packed rows need no such plan.
    """
    return 64 if device == "cuda" and implementation == "transformer_engine" and not packed else 1


def fp8_token_multiple(fp8: str | None, recipe: str | None) -> int:
    """Return the required multiple of a rank's tokens for matrix products in fp8; 1 without fp8."""
    if fp8 is None:
        return 1
    return 32 if recipe == "mxfp8" else 16


def require_learned_positions(length: int, positions: int) -> None:
    """Raise `McaError` if a sequence of ``length`` tokens exceeds the ``positions`` of a learned embedding."""
    if length > positions:
        raise McaError(
            f"a sequence of {length} tokens is longer than the model's {positions} learned positions "
            "(max_position_embeddings); shorten it"
        )


def position_problem(model: McaModelConfig, length: int) -> str | None:
    """Return a message if sequences of ``length`` tokens exceed the model's positions, else None.

    Rope scaling sets the number of positions; dynamic scaling allows any number.
    """
    scaling = model.rope.rope_scaling or {}
    if scaling.get("rope_type") == "dynamic":
        return None
    known = model.max_position_embeddings
    scaled = float(scaling.get("factor") or 1) * float(
        scaling.get("original_max_position_embeddings") or known
    )
    positions = max(known, int(scaled))
    if length <= positions:
        return None
    if model.embedding.learned_positions:
        return (
            f"sequences of {length} tokens are longer than the model's {positions} learned positions "
            "(max_position_embeddings); lower seq_length"
        )
    return (
        f"sequences of {length} tokens are longer than the model's {positions} positions (max_position_embeddings and "
        "rope scaling), beyond which it has not been trained; lower seq_length, or set rope_scaling in its config.json"
    )


def _is_sequence_parallel(layout: ParallelLayout, sequence_parallel: bool | None) -> bool:
    return (layout.tp > 1 and layout.ep > 1) if sequence_parallel is None else sequence_parallel


def _caught_messages(build: Callable[[], object]) -> list[str]:
    try:
        build()
    except McaError as error:
        return [str(error)]
    return []


def _layers(model: McaModelConfig, layout: ParallelLayout) -> list[str]:
    return _caught_messages(lambda: pipeline_plan(layout, model.num_layers, model.mtp_num_layers))


def _one_stage(model: McaModelConfig, layout: ParallelLayout) -> list[str]:
    """Report features for which a stage needs more from an earlier stage than hidden states, which are all it gets."""
    if model.per_layer_embedding is not None and layout.pp > 1:
        return [
            "per-layer embeddings (hidden_size_per_layer_input) are not supported with pipeline parallelism; "
            f"set pipeline_model_parallel_size to 1, not {layout.pp}"
        ]
    plan = pipeline_plan(layout, model.num_layers, model.mtp_num_layers)
    for layer in range(model.num_layers):
        source = model.kv_source_layer(layer)
        if source is not None and plan.layer_chunk(source) != plan.layer_chunk(layer):
            return [
                f"layer {layer} takes the keys and values of layer {source} (num_kv_shared_layers), which must be "
                "on its stage; set pipeline_model_parallel_size to 1, or move the layers by "
                "pipeline_model_parallel_layout"
            ]
    return []


def _pairs(model: McaModelConfig, layout: ParallelLayout) -> list[str]:
    """Check that both layers of a shortcut MoE pair are in one stage, because the second adds the expert output."""
    if model.moe is None or not model.moe.moe_shortcut or _layers(model, layout):
        return []
    split = [chunk for chunk in pipeline_plan(layout, model.num_layers) if len(chunk.layers) % 2]
    return [
        f"pipeline_model_parallel_size {layout.pp} x virtual_pipeline_model_parallel_size {layout.vpp} leaves a stage "
        f"with {counted(len(chunk.layers), 'layer')}, and layers of {model.model_type} come in pairs that share a "
        "stage; change these sizes, or give pipeline_model_parallel_layout with an even number of t in each stage"
        for chunk in split[:1]
    ]


def _heads(model: McaModelConfig, layout: ParallelLayout) -> list[str]:
    problems = _indivisible(
        "num_attention_heads", model.attention.num_attention_heads, "tensor_model_parallel_size", layout.tp
    )
    groups = model.attention.num_query_groups
    if groups % layout.tp and layout.tp % groups:
        problems.append(
            f"num_query_groups {groups}{_hf_name(model, 'num_key_value_heads')} is neither a multiple nor a divisor of "
            f"tensor_model_parallel_size {layout.tp}; change tensor_model_parallel_size, for example to "
            f"{math.gcd(groups, layout.tp)}"
        )
    elif groups < layout.tp and 2 * groups * model.attention.kv_channels % layout.tp:
        problems.append(
            f"keys and values of {groups} x {model.attention.kv_channels} rows each cannot be divided by "
            f"tensor_model_parallel_size {layout.tp}; use at most {groups}, or a size that divides "
            f"{2 * groups * model.attention.kv_channels}"
        )
    flat = model.to_fields()
    for name in ("linear_num_key_heads", "linear_num_value_heads", "mamba_num_heads", "scan_channels"):
        if flat.get(name) is not None:
            problems += _indivisible(name, flat[name], "tensor_model_parallel_size", layout.tp)
    return problems + _few_groups(model, layout) + _mamba_groups(model, layout)


def _mamba_groups(model: McaModelConfig, layout: ParallelLayout) -> list[str]:
    """Check that each tensor-parallel rank of a Mamba layer has whole groups of heads, or heads of one group."""
    if model.mamba is None or model.mamba.mamba_num_groups % layout.tp == 0:
        return []
    tp, groups = layout.tp, model.mamba.mamba_num_groups
    if tp % groups:
        return [
            f"mamba_num_groups {groups} is neither a multiple nor a divisor of tensor_model_parallel_size {tp}; "
            "change tensor_model_parallel_size"
        ]
    rows = groups * model.mamba.mamba_state_dim
    return _indivisible("mamba_num_groups x mamba_state_dim", rows, "tensor_model_parallel_size", tp)


def _few_groups(model: McaModelConfig, layout: ParallelLayout) -> list[str]:
    """Report features that do not work with tp > num_query_groups, where Megatron gathers q, k, v and splits only q."""
    unsupported = {
        "attention_output_gate": model.attention.attention_output_gate,
        "qk_layernorm_full_width": model.attention.qk_layernorm_full_width,
        "qk_layernorm_per_head": model.attention.qk_layernorm_per_head,
        "custom q, k, v projections": model.has_custom_qkv,
    }
    tp, groups = layout.tp, model.attention.num_query_groups
    return [
        f"tensor_model_parallel_size {tp} is above num_query_groups {groups}, which is not supported with {name}; "
        f"use at most {groups}"
        for name, on in unsupported.items()
        if on and tp > groups
    ]


def _dense_mlp(model: McaModelConfig, layout: ParallelLayout) -> list[str]:
    layers = [layer for layer in range(model.num_layers) if model.has_mlp(layer)]
    if all(model.is_moe_layer(layer) for layer in layers):
        return []
    width, other = model.mlp.ffn_hidden_size, _hf_name(model, "intermediate_size")
    return _indivisible("ffn_hidden_size", width, "tensor_model_parallel_size", layout.tp, other)


def _mtp(model: McaModelConfig, layout: ParallelLayout) -> list[str]:
    """Check hidden_size, because tp splits the rows of the MTP projection, and the stage of MTP layers."""
    if not model.mtp_num_layers:
        return []
    name = "hidden_size (of MTP layers)"
    problems = _indivisible(name, model.hidden_size, "tensor_model_parallel_size", layout.tp)
    if model.mtp.mtp_before_final_norm and not _layers(model, layout):
        plan = pipeline_plan(layout, model.num_layers, model.mtp_num_layers)
        if plan.final_norm != plan.mtp_chunk(0):
            problems.append(
                f"MTP layers of {model.model_type} take the output of the last decoder layer without the final norm; "
                "move m of pipeline_model_parallel_layout into the stage of the last t"
            )
    return problems


def _experts(model: McaModelConfig, layout: ParallelLayout) -> list[str]:
    if model.moe is None:
        sizes = {"expert_model_parallel_size": layout.ep}
        if layout.etp != layout.tp:
            sizes["expert_tensor_parallel_size"] = layout.etp
        return [
            f"the model has no experts; set {name} to 1, not {size}"
            for name, size in sizes.items()
            if size > 1
        ]
    problems = _indivisible(
        "num_moe_experts", model.moe.num_moe_experts, "expert_model_parallel_size", layout.ep
    )
    width = model.moe.moe_ffn_hidden_size or model.mlp.ffn_hidden_size
    problems += _indivisible("moe_ffn_hidden_size", width, "expert_tensor_parallel_size", layout.etp)
    shared = model.moe.moe_shared_expert_intermediate_size
    if shared:
        name = "moe_shared_expert_intermediate_size"
        problems += _indivisible(name, shared, "tensor_model_parallel_size", layout.tp)
    if model.mlp.add_bias_linear and layout.etp > 1:
        problems.append(
            f"experts with biases do not support expert tensor parallelism; set expert_tensor_parallel_size to 1, "
            f"not {layout.etp}"
        )
    return problems


def _sequence(layout: ParallelLayout, seq_length: int, sequence_parallel: bool | None) -> list[str]:
    multiple = sequence_multiple(layout, sequence_parallel)
    if seq_length % multiple == 0:
        return []
    flags = ["context_parallel_size"] if layout.cp > 1 else []
    if _is_sequence_parallel(layout, sequence_parallel):
        flags.append("tensor_model_parallel_size (with sequence_parallel)")
    return [
        f"the sequence length {seq_length} is not a multiple of {multiple}, which {' and '.join(flags)} requires; "
        f"change it to {-(-seq_length // multiple) * multiple}, or change {flags[0]}"
    ]


def _hf_name(model: McaModelConfig, key: str) -> str:
    """Return the name of a size in the model's config.json in parentheses, if it is there."""
    return f" ({key})" if key in (model.hf_config or {}) else ""


def _indivisible(name: str, value: int, flag: str, size: int, other: str = "") -> list[str]:
    if value % size == 0:
        return []
    fitting = next(divisor for divisor in range(min(size, value), 0, -1) if value % divisor == 0)
    return [
        f"{name} {value}{other} cannot be divided by {flag} {size}; change {flag}, for example to {fitting}"
    ]
