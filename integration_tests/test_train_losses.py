"""Packed rows, smoothed labels and other losses train as the plain thing does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from harness import run_ranks
from train_cases import VOCAB, history, make_trainer, quietly, samples, tiny_checkpoint, train_losses

pytestmark = pytest.mark.ranks

STEPS = 4
WHOLE = {"max_steps": STEPS, "train_sampling_strategy": "sequential"}  # a step takes all 44 samples
PLAIN = WHOLE | {"gradient_accumulation_steps": 44}
PACKED = WHOLE | {"gradient_accumulation_steps": 44, "sequence_packing": True}
LAYOUTS = {
    "single": (1, {}),
    "micro-batch-2": (1, {"per_device_train_batch_size": 2}),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "cp2": (2, {"context_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2": (2, {}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def unpacked(checkpoint, tmp_path_factory):
    return run_ranks(1, train_losses, checkpoint, tmp_path_factory.mktemp("out"), **PLAIN)[0]


def worst(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other) > 0
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_losses_equal_unpacked_ones(name, unpacked, checkpoint, tmp_path):
    size, changes = LAYOUTS[name]
    found = run_ranks(size, train_losses, checkpoint, tmp_path, **(PACKED | changes))[0]
    assert worst(unpacked["loss"], found["loss"]) < 1e-5
    assert worst(unpacked["grad_norm"], found["grad_norm"]) < 1e-4
    assert worst(unpacked["eval_loss"], found["eval_loss"]) < 1e-5
