"""Layouts that a family's own layers cannot be cut for, in one line each."""

from collections.abc import Iterator

from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig


def problems(config: McaModelConfig, layout: ParallelLayout) -> Iterator[str]:
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
    linear = {
        "linear_num_key_heads": config.linear_num_key_heads,
        "linear_num_value_heads": config.linear_num_value_heads,
    }
    for name, heads in linear.items():
        if heads is not None and heads % tp:
            yield f"tensor_model_parallel_size {tp} does not divide {name} {heads}"
