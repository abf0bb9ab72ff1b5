"""Costs of modules in place of attention, against sums by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from mca_models.templates.parts.gated_delta_net import DELTA_NET_COSTS
from mca_models.templates.parts.layer_costs import CHUNK
from mca_models.templates.parts.lightning_attention import LIGHTNING_COSTS
from mca_models.templates.parts.mamba import MAMBA_COSTS, num_heads
from mca_models.templates.parts.selective_scan import SCAN_COSTS
from mca_models.templates.parts.short_convolution import CONVOLUTION_COSTS

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


def saved(costs: Any, model: Any, width: int = 2) -> dict[str, float]:
    return {line.what: line.bytes for line in costs.saved(model, sizes(width))}


def test_lightning_attention_keeps_matrices_and_states_of_each_chunk() -> None:
    own = SimpleNamespace(lightning_num_heads=VALUE_HEADS, lightning_head_dim=VALUE)
    model = SimpleNamespace(lightning_attention=own, hidden_size=HIDDEN)
    heads, values = VALUE_HEADS / TP, TOKENS * VALUE_HEADS * VALUE / TP
    assert saved(LIGHTNING_COSTS, model) == {
        "projected queries, keys and values": values * 6,
        "queries, keys and values of chunks": values * 12,
        "decayed queries and keys": values * 8,
        "token-by-token matrices of a chunk": TOKENS * heads * CHUNK * 4,
        "states": TOKENS * heads * VALUE * VALUE / 16,
        "gate, activated, and normalized and gated outputs": values * 6,
        "norm: input in fp32": values * 4,
        "norm: normalized in fp32": values * 4,
    }


@pytest.mark.parametrize("groups", [1, 6])
@pytest.mark.parametrize("norm", ["gated", "none"])
def test_a_mamba_layer_keeps_b_and_c_of_groups_and_the_rest_of_heads(norm: str, groups: int) -> None:
    """Two ranks that share a group have all of its states, and part of its channels in the convolution."""
    own = SimpleNamespace(
        mamba_num_heads=10,
        mamba_head_dim=VALUE,
        mamba_state_dim=KEY,
        mamba_num_groups=groups,
        mamba_norm=norm,
    )
    model: Any = SimpleNamespace(mamba=own, hidden_size=HIDDEN)
    channels, of_groups = 5 * VALUE, groups / 2 * KEY
    expected = {
        "convolution: padded, and its output": TOKENS * (channels + 2 * of_groups) * 4,
        "inputs, and inputs times steps": TOKENS * channels * 8,
        "B, C and dt of the projection, without copies": 0,
        "gate, activated and not, and output": TOKENS * channels * (14 if norm == "none" else 22),
        "B and C": TOKENS * max(of_groups, KEY) * 8,
        "token-by-token matrices of a chunk": TOKENS * 5 * CHUNK * 8,
        "decayed B and C": TOKENS * 5 * KEY * 8,
        "states": TOKENS / CHUNK * channels * KEY * 8,
    }
    assert saved(MAMBA_COSTS, model) == expected
    single = saved(MAMBA_COSTS, model, 4)
    of_projection = TOKENS * (channels + 4 * of_groups + 5) * 4
    assert single["B, C and dt of the projection, without copies"] == of_projection
    assert single["convolution: padded, and its output"] == TOKENS * (channels + 2 * of_groups) * 8
    rows = 3 * 10 * VALUE + 2 * groups * KEY + 10
    assert MAMBA_COSTS.weights(model, sizes()) == HIDDEN * rows / TP
    shared = max(groups, TP) * KEY
    products = CHUNK * (10 * VALUE + shared) + 2 * 10 * VALUE * KEY
    assert MAMBA_COSTS.flops(model, sizes()) == 2 * TOKENS * products / TP
    assert num_heads(model) == 10 and num_heads(SimpleNamespace(mamba=None)) == 0  # type: ignore[arg-type]


def test_a_selective_scan_keeps_steps_of_channels_and_norms_of_all() -> None:
    own = SimpleNamespace(scan_channels=48, scan_step_rank=7, scan_state_dim=KEY, scan_norm="plain")
    model: Any = SimpleNamespace(selective_scan=own, hidden_size=HIDDEN)
    channels = TOKENS * 48 / TP
    assert saved(SCAN_COSTS, model) == {
        "convolution: padded, its output, and activated": channels * 6,
        "norms of steps, B and C": TOKENS * (7 + 2 * KEY) * 12,
        "gate, in fp32 and activated": channels * 8,
        "output, and gated": channels * 6,
        "steps, before and after softplus": channels * 8,
        "inputs, B and C in fp32": (channels + TOKENS * 2 * KEY) * 4,
        "states": channels * KEY / 16,
    }
    assert SCAN_COSTS.weights(model, sizes()) == 48 * (3 * HIDDEN + 2 * 7 + 2 * KEY) / TP
    assert SCAN_COSTS.flops(model, sizes()) == channels * KEY * (6 + 3 * 6), "64 tokens double six times"


def test_a_short_convolution_keeps_six_times_its_channels() -> None:
    model: Any = SimpleNamespace(hidden_size=HIDDEN)
    channels = TOKENS * HIDDEN / TP * 2
    assert saved(CONVOLUTION_COSTS, model) == {
        "gates and inputs": 3 * channels,
        "convolution: padded, and its output": 2 * channels,
        "gated output": channels,
    }
    assert CONVOLUTION_COSTS.weights(model, sizes()) == 4 * HIDDEN * HIDDEN / TP
    assert CONVOLUTION_COSTS.flops(model, sizes()) == 0
