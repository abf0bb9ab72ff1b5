"""The loss of a run is the same on every layout."""

import pytest

import loss_curves
from harness import run_ranks
from loss_curves import ALL, CurvesOf, worst
from train_cases import STEPS, tiny_checkpoint, train_losses
from train_settings import OVERLAP, TP, VPP

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def curves(tmp_path_factory, every_case):
    """Of more steps than an epoch has, the last of which is short."""
    run = (loss_curves.STEPS, loss_curves.COUNT) if every_case else (5, 14)
    return CurvesOf(tmp_path_factory.mktemp("curves"), *run)


@pytest.fixture(scope="module")
def single(checkpoint, tmp_path_factory):
    return run_ranks(1, train_losses, checkpoint, tmp_path_factory.mktemp("single"))[0]


def test_the_single_run_learns_and_counts_its_steps(single):
    assert len(single["loss"]) == STEPS
    assert single["loss"][-1] < single["loss"][0] - 0.5


@pytest.mark.cases(
    0,
    always=[
        *("dense/micro-batch-4", "dense/dp2-pp2-vpp2-zero-reduce-gather", "moe/ep2-zero-reduce-gather"),
    ],
)
@pytest.mark.parametrize("name", ALL)
def test_losses_equal_the_single_process_run(name, curves):
    difference = curves.difference(name)
    assert difference.small, difference


def test_tied_embeddings_on_a_pipeline(tmp_path_factory):
    tied = tiny_checkpoint(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)
    run = {"max_steps": 2, "gradient_accumulation_steps": 4}
    single = run_ranks(1, train_losses, tied, tmp_path_factory.mktemp("out"), **run)[0]
    found = run_ranks(4, train_losses, tied, tmp_path_factory.mktemp("out"), **(run | TP | VPP))[0]
    assert worst(single["loss"], found["loss"]) < 1e-5


def test_bf16_stays_near_fp32(single, checkpoint, tmp_path):
    found = run_ranks(2, train_losses, checkpoint, tmp_path, bf16=True, **OVERLAP)[0]
    assert worst(single["loss"], found["loss"]) < 2e-2
