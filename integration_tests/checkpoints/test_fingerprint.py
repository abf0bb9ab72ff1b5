"""A live model's fingerprint depends on its weights and not on the layout."""

from pathlib import Path

import pytest

from harness import run_ranks
from layouts import arguments, world_size
from reference import make_reference

pytestmark = pytest.mark.ranks


def fingerprints(base: Path, name: str) -> tuple[int, int, int]:
    """Fingerprints of a model as read, with one changed bit in the last layer, and read again into the same model."""
    import torch

    from mca_models.megatron import AutoModel
    from mca_models.megatron.state.fingerprint import fingerprint

    models = AutoModel.from_pretrained(base, arguments(name))
    found = fingerprint(models)
    before = [(key, tensor.clone()) for key, tensor in models.export_weights()]
    layout, at = models.rank_context.layout, models.rank_context.coordinates
    if (at.tp, at.pp) == (layout.tp - 1, layout.pp - 1):
        *_, last = (tensor for key, tensor in models.canonical_parameters() if "linear_qkv.weight" in key)
        last.data.view(-1).view(torch.int32)[-1] ^= 1
    changed = fingerprint(models)
    models.load_weights(before)
    return found, changed, fingerprint(models)


@pytest.mark.cases(0, always=["tp2ep2etp1sp"])
@pytest.mark.parametrize("layout", ["tp2ep2etp1sp", "pp2vpp2", "tp4", "cp2ep2"])
def test_layouts_have_the_same_and_other_weights_another(layout: str, tmp_path: Path) -> None:
    base = make_reference("qwen3_moe", tmp_path).path
    found = {*run_ranks(1, fingerprints, base, "tp1")}
    found |= {*run_ranks(world_size(layout), fingerprints, base, layout)}
    ((first, changed, again),) = found
    assert first == again != changed
    assert max(abs(first), abs(changed)) > 1 << 40, "sums of 64 bits"
