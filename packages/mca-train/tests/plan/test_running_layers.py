"""Peak of a layer's running passes next to what it saves, for both kinds of layers, by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from mca_models.templates.parts.layer_costs import CHUNK
from mca_train.plan import local_layers, te_layers

TOKENS, SPLIT, HIDDEN, WIDTH, INNER = 14, 7, 5, 2, 12
BETWEEN, WHOLE = SPLIT * HIDDEN * WIDTH, TOKENS * HIDDEN * WIDTH


def peaks(layers: Any, *, has_mlp: bool = True, sent: int = 0, etp: int = 1, is_split: bool = False) -> Any:
    """Return the peaks of a layer on two tensor ranks; ``sent``: tokens that experts of 3 channels get."""
    config: Any = SimpleNamespace(hidden_size=HIDDEN, mamba=SimpleNamespace(mamba_num_heads=6))
    config.mlp, config.has_mlp = SimpleNamespace(ffn_hidden_size=INNER), lambda layer: has_mlp
    config.is_moe_layer = lambda layer: sent > 1
    sizes: Any = SimpleNamespace(tokens=TOKENS, split=SPLIT, width=WIDTH, is_split=is_split)
    sizes.layout, sizes.dispatched = SimpleNamespace(tp=2, etp=etp), lambda: sent
    sizes.moe = SimpleNamespace(hidden=3) if sent else None
    return layers.running(config, sizes, 0)


def test_an_activation_of_two_branches_keeps_both_its_input_and_where_it_is_positive() -> None:
    config: Any = SimpleNamespace(mlp=SimpleNamespace(mlp_multipliers=None, hidden_act="xielu"))
    sizes: Any = SimpleNamespace(width=WIDTH)
    (line,) = local_layers.custom_activation(config, 100, sizes, "mlp")
    assert line.bytes == 100 * (WIDTH + WIDTH + WIDTH + 1)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("sent", [0, 1])
def test_a_dense_layer_runs_with_gradients_of_its_mlp(is_split: bool, sent: int) -> None:
    """With sequence parallelism the hidden states of all tokens are gathered; the local layers free a half early."""
    inner, gathered = TOKENS * INNER / 2 * WIDTH, WHOLE * is_split
    forward = 2 * BETWEEN + gathered
    local = peaks(local_layers, is_split=is_split, sent=sent)
    assert local == (forward, 2 * inner + BETWEEN + gathered / 2)
    assert peaks(te_layers, is_split=is_split, sent=sent) == (forward, 2 * inner + BETWEEN + gathered)


@pytest.mark.parametrize("is_split", [False, True])
def test_a_mixer_alone_runs_with_its_hidden_states_and_in_local_layers_with_weights_of_chunks(
    is_split: bool,
) -> None:
    gathered = WHOLE * is_split
    weights = TOKENS * 6 / 2 * CHUNK * 4
    local = peaks(local_layers, has_mlp=False, is_split=is_split)
    assert local == (2 * BETWEEN + gathered, 3 * weights + BETWEEN + gathered / 2)
    engine = peaks(te_layers, has_mlp=False, is_split=is_split)
    assert engine == (2 * BETWEEN + gathered, BETWEEN + gathered)


@pytest.mark.parametrize(("etp", "factor"), [(1, 1), (2, 2)])
def test_experts_run_with_copies_of_their_tokens(etp: int, factor: int) -> None:
    once = 9 * 3 * WIDTH * factor
    assert peaks(local_layers, sent=9, etp=etp) == (4 * once + 3 * BETWEEN, 3 * once + 2 * BETWEEN)
    assert peaks(te_layers, sent=9, etp=etp) == (3 * once + 2 * BETWEEN,) * 2
