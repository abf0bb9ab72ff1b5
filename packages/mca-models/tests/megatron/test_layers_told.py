"""Whoever has a GPU and no Transformer Engine is told so once."""

import pytest

from mca_models.megatron.auto import slower_layers


@pytest.mark.parametrize(
    ("built", "asked", "device", "told"),
    [
        ("local", None, "cuda", True),
        ("local", "local", "cuda", False),
        ("transformer_engine", None, "cuda", False),
        ("local", None, "cpu", False),
    ],
)
def test_local_layers_on_a_gpu_are_told_unless_asked_for(built, asked, device, told):
    said = slower_layers(built, asked, device)
    assert (said is not None) == told
    assert not told or "mca-models[te]" in said
