"""Tensors that mca's own attention keeps, by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

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
