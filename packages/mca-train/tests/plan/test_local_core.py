"""Tensors that mca's own attention keeps, by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from mca_models.templates.parts.mla import saved_core
from mca_train.plan import local_layers
from mca_train.plan.local_layers import channels, core


def made(heads: int, groups: int, tp: int, *, gated: bool = False) -> tuple[Any, Any]:
    attention = SimpleNamespace(
        num_attention_heads=heads, num_query_groups=groups, kv_channels=5, attention_output_gate=gated
    )
    sizes = SimpleNamespace(layout=SimpleNamespace(tp=tp), width=2, tokens=7)
    return SimpleNamespace(attention=attention), sizes


@pytest.mark.parametrize(
    ("heads", "groups", "tp", "query", "key"),
    [(6, 6, 1, 30, 30), (6, 2, 1, 30, 10), (6, 2, 2, 15, 5), (6, 1, 3, 10, 5), (8, 2, 4, 10, 5)],
)
@pytest.mark.parametrize("gated", [False, True])
def test_queries_keys_and_values_on_a_tensor_rank(
    heads: int, groups: int, tp: int, query: int, key: int, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven tokens attend to 11 keys, with 2 bytes a number; fewer groups than ranks are copied."""
    config, sizes = made(heads, groups, tp, gated=gated)
    assert channels(config, sizes) == (query, key)
    monkeypatch.setattr(local_layers, "_num_keys", lambda sizes: 11)
    monkeypatch.setattr(local_layers, "_scores", lambda config, sizes, width: [f"scores of {width:g}"])
    monkeypatch.setattr(local_layers, "_sliding_window_mask", lambda *_: ["mask"])
    lines: list[Any] = core(config, sizes, 0)
    assert lines[-2:] == [f"scores of {query}", "mask"]
    copied = 11 * query * 2 * 2 if key < query else 7 * (2 * key + query + key) * 2
    expected = [7 * query * 2, copied, *([7 * query * 2 * 2] if gated else [])]
    assert [line.bytes for line in lines[:-2]] == expected
    assert (lines[1].module == "core_attn") == (key < query)


@pytest.mark.parametrize(
    ("length", "window", "shape"),
    [(600, 10, (512, 521)), (20, 10, (20, 20)), (600, 599, (512, 600)), (600, 600, None), (20, None, None)],
)
@pytest.mark.parametrize("kinds", [None, ("full_attention", "sliding_attention")])
def test_a_block_of_queries_has_a_mask_of_the_keys_in_its_window(
    length: int, window: int | None, shape: tuple[int, int] | None, kinds: Any
) -> None:
    config: Any = SimpleNamespace(attention=SimpleNamespace(window_size=window), layer_types=kinds)
    sizes: Any = SimpleNamespace(length=length, width=2)
    lines = local_layers._sliding_window_mask(config, sizes, 1)
    assert [line.bytes for line in lines] == ([] if shape is None else [shape[0] * shape[1] * 2])
    assert kinds is None or not local_layers._sliding_window_mask(config, sizes, 0)


def test_each_of_two_slices_of_a_context_rank_has_a_mask_of_its_own_keys() -> None:
    """Slices of 12 / 2 tokens of the rank, and their keys of two to four ranks' slices; numbers of 2 bytes."""
    config: Any = SimpleNamespace(attention=SimpleNamespace(num_attention_heads=6))

    def lines(cp: int, **fields: Any) -> list[tuple[str, float]]:
        layout = SimpleNamespace(tp=2, cp=cp)
        sizes: Any = SimpleNamespace(layout=layout, tokens=12, length=12, width=2, has_attention_matrix=False)
        vars(sizes).update(fields)
        return [(line.what, line.bytes) for line in local_layers._scores(config, sizes, 15)]

    whole = [("attention's output", 12 * 15 * 2), ("log-sum-exp of attention", 12 * 3 * 4)]
    assert lines(1) == whole
    assert lines(1, has_attention_matrix=True)[2:] == [("attention weights and dropout", 12 * 12 * 3 * 3 * 4)]
    assert lines(2) == [(whole[0][0], 2 * whole[0][1]), whole[1], ("mask of a slice", 6 * (2 * 2 * 6) * 2)]


def test_latent_attention_pads_values_to_the_width_of_keys() -> None:
    """Three of six heads with keys of 5 + 2 channels and values of 4, for 11 tokens of 2 bytes."""
    mla = SimpleNamespace(qk_head_dim=5, qk_pos_emb_head_dim=2, v_head_dim=4, latent_head_gate=True)
    config: Any = SimpleNamespace(attention=SimpleNamespace(num_attention_heads=6), mla=mla)
    sizes: Any = SimpleNamespace(tokens=11, width=2, layout=SimpleNamespace(tp=2))
    found = {line.what: line.bytes for line in saved_core(config, sizes)}
    assert found == {
        "queries and keys": 11 * 21 * 2 * 2,
        "values, padded to the keys": 11 * 21 * 2,
        "attention's output, padded": 11 * 21 * 2,
        "attention's output": 11 * 12 * 2,
        "gated output, and gates": 11 * (12 + 6) * 2,
        "log-sum-exp of attention": 11 * 3 * 4,
    }
    mla.latent_head_gate = False
    assert found.keys() - {line.what for line in saved_core(config, sizes)} == {"gated output, and gates"}
