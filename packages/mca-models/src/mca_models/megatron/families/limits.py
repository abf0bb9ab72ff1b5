"""Layouts that a family's own layers cannot be cut for, in one line each."""

from collections.abc import Iterator

from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig


def problems(config: McaModelConfig, layout: ParallelLayout, implementation: str) -> Iterator[str]:
    """Why the model cannot be built on ``layout``."""
    tp, groups = layout.tp, config.num_query_groups
    few = {
        "attention_output_gate": config.attention_output_gate,
        "qk_layernorm_full_width": config.qk_layernorm_full_width,
    }
    for name in [name for name, on in few.items() if on and tp > groups]:
        yield (
            f"tensor_model_parallel_size {tp} is more than the {groups} key/value heads, which Megatron does not "
            f"compute with {name}; use at most {groups}"
        )
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        heads = {"linear_num_key_heads": config.linear_num_key_heads}.get(name, config.linear_num_value_heads)
        if heads is not None and heads % tp:
            yield f"tensor_model_parallel_size {tp} does not divide the model's {heads} {name}"
    if implementation == "transformer_engine" and any(
        config.is_linear_layer(layer) for layer in range(config.num_layers)
    ):
        yield (
            "linear attention layers are built for the local implementation only; set transformer_impl to local"
        )
