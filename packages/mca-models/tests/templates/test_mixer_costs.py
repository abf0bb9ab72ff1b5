"""Costs of modules in place of attention, against sums by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from mca_models.templates.parts.gated_delta_net import DELTA_NET_COSTS
from mca_models.templates.parts.layer_costs import CHUNK
from mca_models.templates.parts.lightning_attention import LIGHTNING_COSTS

KEY_HEADS, VALUE_HEADS, KEY, VALUE, HIDDEN = 2, 8, 16, 32, 64
TOKENS, TP = 128, 2


def sizes(width: int = 2) -> Any:
    return SimpleNamespace(tokens=TOKENS, width=width, layout=SimpleNamespace(tp=TP), frozen=False, rms=True)


def config(*, by_channel: bool, low_rank: bool = True) -> Any:
    linear = SimpleNamespace(
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=KEY,
        linear_value_head_dim=VALUE,
        linear_channel_decay=by_channel,
        linear_low_rank_gates=low_rank,
    )
    return SimpleNamespace(linear_attention=linear, hidden_size=HIDDEN)


def test_a_gated_delta_net_multiplies_by_both_projections_and_within_chunks() -> None:
    """In: queries, keys, values, gate, and two numbers of a head; out: values."""
    values = VALUE_HEADS * VALUE
    projections = HIDDEN * (2 * KEY_HEADS * KEY + 2 * values + 2 * VALUE_HEADS) + values * HIDDEN
    assert DELTA_NET_COSTS.weights(config(by_channel=False), sizes()) == projections / TP
    full_rank = HIDDEN * VALUE_HEADS * (KEY - 1)
    gated = config(by_channel=True, low_rank=False)
    assert DELTA_NET_COSTS.weights(gated, sizes()) == (projections + full_rank) / TP
    within, states = CHUNK * (3 * KEY + 2 * VALUE), 3 * KEY * VALUE
    assert (
        DELTA_NET_COSTS.flops(config(by_channel=False), sizes())
        == 2 * TOKENS * VALUE_HEADS * (within + states) / TP
    )


@pytest.mark.parametrize(("by_channel", "more"), [(False, 0), (True, 3 * 16 * KEY)])
def test_a_gated_delta_net_keeps_matrices_of_each_chunk_and_with_decay_by_channel_more(
    by_channel: bool, more: int
) -> None:
    saved = {line.what: line.bytes for line in DELTA_NET_COSTS.saved(config(by_channel=by_channel), sizes())}
    heads, keys, values = VALUE_HEADS / TP, VALUE_HEADS * KEY / TP, VALUE_HEADS * VALUE / TP
    both = 2 * KEY_HEADS * KEY / TP
    assert saved == {
        "convolution: padded, and its output": TOKENS * (both + values) * 2 * 2,
        "queries and keys in fp32": TOKENS * both * 4,
        "gate, activated, and output": TOKENS * values * (2 * 4 + 2 * 2),
        "norm: input in fp32": TOKENS * values * 4,
        "norm: normalized in fp32": TOKENS * values * 4,
        "queries, keys and values of chunks": TOKENS * (2 * keys + values) * 4,
        "token-by-token matrices of a chunk": TOKENS * heads * (CHUNK * 6 + more) * 4,
        "solved, and corrections": TOKENS * (keys + 2 * values) * 4,
        "decayed queries and keys": TOKENS * 2 * keys * 4,
        "states": TOKENS / CHUNK * keys * VALUE * 4,
    }


def test_lightning_attention_multiplies_by_both_projections_and_within_chunks() -> None:
    """In: queries, keys, values and gates; out: values."""
    own = SimpleNamespace(lightning_num_heads=VALUE_HEADS, lightning_head_dim=VALUE)
    model: Any = SimpleNamespace(lightning_attention=own, hidden_size=HIDDEN)
    assert LIGHTNING_COSTS.weights(model, sizes()) == 5 * HIDDEN * VALUE_HEADS * VALUE / TP
    within, states = 2 * CHUNK * VALUE, 2 * VALUE * VALUE
    assert LIGHTNING_COSTS.flops(model, sizes()) == 2 * TOKENS * VALUE_HEADS * (within + states) / TP
