"""The loss of a run is the same on every layout."""

from typing import Any

import pytest

from harness import run_ranks
from train_cases import STEPS, tiny_checkpoint, train_losses

pytestmark = pytest.mark.ranks

TP = {"tensor_model_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
VPP = PP | {"virtual_pipeline_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
SP = TP | {"sequence_parallel": True}
DP = {"gradient_accumulation_steps": 4}  # half as many micro-batches on each of two replicas
ZERO = DP | {"use_distributed_optimizer": True}
OVERLAP = ZERO | {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 5000}

LAYOUTS = {
    "tp2": (2, TP),
    "tp2-sp": (2, SP),
    "pp2": (2, PP),
    "pp2-vpp2": (2, VPP),
    "cp2": (2, CP),
    "dp2": (2, DP),
    "dp2-distributed-optimizer": (2, ZERO),
    "dp2-overlap": (2, OVERLAP),
    "micro-batch-4": (1, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
    "tp2-pp2": (4, TP | PP),
    "tp2-pp2-vpp2": (4, TP | VPP),
    "tp2-sp-cp2": (4, SP | CP),
    "dp2-pp2-vpp2-overlap": (4, OVERLAP | VPP),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def single(checkpoint, tmp_path_factory):
    return run_ranks(1, train_losses, checkpoint, tmp_path_factory.mktemp("single"))[0]


def worst(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other)
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


def test_the_single_run_learns_and_counts_its_steps(single):
    assert len(single["loss"]) == STEPS
    assert single["loss"][-1] < single["loss"][0] - 0.5


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_equal_the_single_process_run(name, single, checkpoint, tmp_path):
    size, changes = LAYOUTS[name]
    found: list[dict[str, Any]] = run_ranks(size, train_losses, checkpoint, tmp_path, **changes)
    assert worst(single["loss"], found[0]["loss"]) < 1e-5
    assert worst(single["grad_norm"], found[0]["grad_norm"]) < 1e-4
    assert worst(single["eval_loss"], found[0]["eval_loss"]) < 1e-5
    for rank in found[1:]:
        assert rank["loss"] == found[0]["loss"], "every rank knows the same loss"


def test_tied_embeddings_on_a_pipeline(tmp_path_factory):
    tied = tiny_checkpoint(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)
    single = run_ranks(1, train_losses, tied, tmp_path_factory.mktemp("out"))[0]
    found = run_ranks(4, train_losses, tied, tmp_path_factory.mktemp("out"), **(TP | VPP))[0]
    assert worst(single["loss"], found["loss"]) < 1e-5


def test_bf16_stays_near_fp32(single, checkpoint, tmp_path):
    found = run_ranks(2, train_losses, checkpoint, tmp_path, bf16=True, **OVERLAP)[0]
    assert worst(single["loss"], found["loss"]) < 2e-2
