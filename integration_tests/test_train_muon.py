"""Muon: Megatron builds it from megatron-core 0.17 on, with the package emerging-optimizers."""

from importlib.util import find_spec
from typing import Any

import pytest

from harness import run_ranks
from train_cases import stop_and_resume, tiny_checkpoint, train_losses

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(find_spec("emerging_optimizers") is None, reason="needs mca-train[muon], Python 3.12"),
]

MUON: dict[str, Any] = {"optimizer": "muon"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def test_muon_learns_and_resumes_bit_for_bit(checkpoint, tmp_path):
    (found,) = run_ranks(1, stop_and_resume, checkpoint, tmp_path, **MUON)
    losses = found["straight"]["loss"]
    assert losses[-1] < 0.9 * losses[0]
    assert found["resumed"]["loss"] == losses


def test_muon_is_not_adam_and_does_not_depend_on_the_pipeline(checkpoint, tmp_path):
    (alone,) = run_ranks(1, train_losses, checkpoint, tmp_path / "alone", **MUON)
    (adam,) = run_ranks(1, train_losses, checkpoint, tmp_path / "adam")
    cut, _ = run_ranks(2, train_losses, checkpoint, tmp_path / "cut", pipeline_model_parallel_size=2, **MUON)
    # its Newton-Schulz iteration multiplies in bf16, which makes rounding errors of 1e-7 visible
    assert cut["loss"] == pytest.approx(alone["loss"], rel=1e-3)
    assert adam["loss"][:2] == pytest.approx(alone["loss"][:2], rel=1e-3), (
        "before the first step both are the model"
    )
    assert adam["loss"] != pytest.approx(alone["loss"], rel=1e-2)
