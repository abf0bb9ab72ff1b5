"""Bounds of the numbers in a model configuration.

A file with a number out of bounds is damaged, and planning its model would use all memory.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from mca_config.errors import McaError
from mca_config.types import Values

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_MOST: Mapping[str, int] = {
    "num_layers": 1 << 12,
    "num_kv_shared_layers": 1 << 12,
    "mtp_num_layers": 100,
    "num_attention_heads": 1 << 12,
    "num_query_groups": 1 << 12,
    "linear_num_key_heads": 1 << 12,
    "linear_num_value_heads": 1 << 12,
    "mamba_num_heads": 1 << 12,
    "mamba_num_groups": 1 << 12,
    "num_moe_experts": 1 << 16,
    "moe_router_topk": 1 << 16,
    "moe_identity_experts": 1 << 16,
    "max_position_embeddings": 1 << 40,
    "window_size": 1 << 40,
}
_LARGEST = 1 << 22
"""Largest value of all other sizes of weights: widths, and the vocabulary."""
_WIDTHS = (
    *("hidden_size", "ffn_hidden_size", "kv_channels", "vocab_size", "moe_ffn_hidden_size"),
    *("moe_shared_expert_intermediate_size", "linear_conv_kernel_dim", "linear_key_head_dim"),
    *("per_layer_input_size", "value_channels", "num_labels", "index_num_heads", "index_head_dim"),
    *("mamba_head_dim", "mamba_state_dim", "mamba_conv_kernel_dim", "moe_latent_size"),
    *(
        "linear_value_head_dim",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_head_dim",
        "qk_pos_emb_head_dim",
        "v_head_dim",
    ),
)
_LARGEST_MATRIX = 1 << 36
"""Largest number of elements of one weight; the embedding of a large model has 2 ** 32."""
_MOST_MLPS = 1 << 16
"""Largest product of layers and experts; DeepSeek V3 has 15,616."""
_LEAST: Mapping[str, int] = {
    **{"mtp_num_layers": 0, "moe_shared_expert_intermediate_size": 0, "kv_lora_rank": 1},
    **{"per_layer_input_size": 0, "num_kv_shared_layers": 0, "moe_identity_experts": 0},
}
_POSITIVE = ("rotary_base", "rotary_base_local", "rotary_percent", "logits_scaling")
_NOT_NEGATIVE = ("layernorm_epsilon", "init_method_std", "mamba_least_step", "sparse_mixer_jitter")
_FACTORS: Mapping[str, int] = {"mamba_multipliers": 6, "mlp_multipliers": 2}
"""Lengths of the lists of factors."""
_SHARES = ("attention_dropout", "hidden_dropout", "embedding_dropout", "input_jitter_noise")


def require_bounded(values: Values) -> None:
    """Check that numbers are within their bounds; None and missing values pass.

    Args:
        values: Fields of ``McaModelConfig`` by name; other checks cover values of another type.

    Raises:
        McaError: Values are out of bounds; the message names all of them.
    """
    if problems := [*_counts(values), *_products(values), *_reals(values)]:
        raise McaError("; ".join(problems))


def require_consistent(values: Values) -> None:
    """Check that fields of a model do not contradict each other.

    Args:
        values: All fields of ``McaModelConfig`` by name.

    Raises:
        McaError: Two fields contradict each other.
    """
    layers, labels, head = values["num_layers"], values["num_labels"], values["head"]
    for name in ("moe_layer_freq", "layer_types", "no_rope_freq"):
        entries = values[name]
        if entries is not None and len(entries) != layers:
            raise McaError(f"{name} has {len(entries)} entries, expected num_layers {layers}")
    for name, count in _FACTORS.items():
        factors = values[name]
        if factors is not None and (len(factors) != count or not all(map(_is_finite, factors))):
            raise McaError(f"{name} must be {count} finite numbers, not {factors!r:.80}")
    if values["moe_shortcut"] and layers % 2:
        raise McaError(
            f"num_layers is {layers} with moe_shortcut, which needs pairs of layers; expected an even number"
        )
    if (head == "causal_lm") != (labels is None) or (labels or 1) < 1:
        raise McaError(f"num_labels is {labels} with head {head}; a classification head needs at least 1")
    first_shared = layers - values["num_kv_shared_layers"]
    kinds = values["layer_types"] or ("attention",) * layers
    if missing := sorted({*kinds[max(first_shared, 0) :]} - {*kinds[: max(first_shared, 0)]}):
        raise McaError(
            f"num_kv_shared_layers {layers - first_shared} of {layers} leaves no layer of type {missing[0]} whose keys "
            "and values the last layers could share; lower it"
        )
    heads, groups = values["num_attention_heads"], values["num_query_groups"]
    if heads % groups:
        raise McaError(f"num_attention_heads {heads} is not a multiple of num_query_groups {groups}")
    _require_factors(values)


def _require_factors(values: Values) -> None:
    """Check that LongRoPE has one factor for each pair of rotated channels."""
    rotated = values.get("qk_pos_emb_head_dim") or int(values["kv_channels"] * values["rotary_percent"])
    for name in ("short_factor", "long_factor"):
        factors = (values["rope_scaling"] or {}).get(name)
        if isinstance(factors, list | tuple) and len(factors) != rotated // 2:
            raise McaError(
                f"rope parameters: {name} has {len(factors)} numbers, expected {rotated // 2}, one for each pair of "
                "rotated channels"
            )


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _counts(values: Values) -> Iterator[str]:
    for name, most in {**dict.fromkeys(_WIDTHS, _LARGEST), **_MOST}.items():
        value, least = values.get(name), _LEAST.get(name, 1)
        if not isinstance(value, int | float) or isinstance(value, bool) or least <= value <= most:
            continue
        if value < least:
            yield f"{name} must be at least {least}, not {value!r:.80}"
        else:
            yield f"{name} must be at most {most}, not {value!r:.80}"


def _products(values: Values) -> Iterator[str]:
    layers, experts, heads, channels = (
        value if isinstance(value, int) else 1
        for value in map(values.get, ("num_layers", "num_moe_experts", "num_attention_heads", "kv_channels"))
    )
    identity = values.get("moe_identity_experts")
    identity = identity if isinstance(identity, int) else 0
    if layers * (experts + identity) > _MOST_MLPS and layers <= _MOST["num_layers"]:
        sum_of = f" plus moe_identity_experts {identity}" if identity else ""
        yield f"num_layers {layers} times num_moe_experts {experts}{sum_of} must be at most {_MOST_MLPS}"
    hidden = values.get("hidden_size")
    for name in ("ffn_hidden_size", "vocab_size", "moe_ffn_hidden_size"):
        width = values.get(name)
        if isinstance(hidden, int) and isinstance(width, int) and hidden * width > _LARGEST_MATRIX:
            yield f"hidden_size {hidden!r:.80} times {name} {width!r:.80} must be at most {_LARGEST_MATRIX}"
    if heads * channels > _LARGEST and max(heads, channels) <= _LARGEST:
        yield f"num_attention_heads {heads} times kv_channels {channels} must be at most {_LARGEST}"


def require_numbers(model: "DataclassInstance") -> None:
    """Raise `McaError` for a value that is not a number in a numeric field, such as ``"4"`` in a ``config.json``."""
    for entry in dataclasses.fields(model):
        value = getattr(model, entry.name)
        if entry.type in (int, float, int | None, float | None) and isinstance(
            value, str | list | tuple | dict
        ):
            raise McaError(
                f"{entry.name} must be a number, not {value!r:.80}; correct the model's config.json"
            )
        if entry.type in (int, int | None) and isinstance(value, float | bool):
            raise McaError(
                f"{entry.name} must be a whole number, not {value!r}; correct the model's config.json"
            )


def _reals(values: Values) -> Iterator[str]:
    for name, value in values.items():
        if not isinstance(value, float):
            continue
        if not math.isfinite(value):
            yield f"{name} must be a finite number, not {value}"
        elif name in _POSITIVE and value <= 0:
            yield f"{name} must be above 0, not {value}"
        elif name in _NOT_NEGATIVE and value < 0:
            yield f"{name} must be at least 0, not {value}"
        elif name in _SHARES and not 0 <= value < 1:
            yield f"{name} must be at least 0 and below 1, not {value}"
