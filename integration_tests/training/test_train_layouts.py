"""The loss of a run is the same on every layout."""

import json

import pytest

import loss_curves
from harness import run_ranks
from loss_curves import ALL, CurvesOf, worst
from train_cases import STEPS, tiny_checkpoint, train_losses
from train_settings import OVERLAP, VPP

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def curves(tmp_path_factory, every_case):
    """Return the curves of more steps than an epoch has, the last of which is short."""
    run = (loss_curves.STEPS, loss_curves.COUNT) if every_case else (4, 10)
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
        *("dense/dp2-pp2-vpp2-zero-reduce-gather", "moe/ep2-zero-reduce-gather"),
    ],
)
@pytest.mark.parametrize("name", ALL)
def test_losses_equal_the_single_process_run(name, curves):
    difference = curves.difference(name)
    assert difference.small, difference


@pytest.mark.qualify
@pytest.mark.parametrize("name", loss_curves.DRAWN)
def test_the_picture_shows_the_losses_of_a_run(name, curves):
    model, _, layout = name.partition("/")
    drawn = json.loads(loss_curves.RECORDED.read_text())[model]
    assert worst(drawn["one process"], curves.single(model)["loss"]) < loss_curves.TOLERANCE
    assert worst(drawn[layout], curves.layout(name)[0]["loss"]) < loss_curves.TOLERANCE


TIED = {"max_steps": 2, "gradient_accumulation_steps": 2, "warmup_steps": 0}
"""The first step moves the weights, so the second one has another loss where gradients are wrong."""


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A model with tied embeddings, and what one process logs."""
    model = tiny_checkpoint(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)
    return model, run_ranks(1, train_losses, model, tmp_path_factory.mktemp("out"), **TIED)[0]


def test_tied_embeddings_on_a_pipeline(tied, tmp_path):
    model, single = tied
    found = run_ranks(2, train_losses, model, tmp_path, **TIED, **VPP)[0]
    assert worst(single["loss"], found["loss"]) < 1e-5
    assert worst(single["grad_norm"], found["grad_norm"]) < 1e-4


def losses_of_embeddings_alone(model, output):
    """With a planted fault: each stage keeps its own gradient of the embeddings that they share."""
    import importlib

    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    module._allreduce_word_embedding_grads = lambda *_, **__: None
    return train_losses(model, output, **TIED, **VPP)


@pytest.mark.qualify
def test_the_comparison_sees_embeddings_that_are_not_tied(tied, tmp_path):
    model, single = tied
    found = run_ranks(2, losses_of_embeddings_alone, model, tmp_path)[0]
    assert worst(single["loss"], found["loss"]) > 1e-4
    assert worst(single["grad_norm"], found["grad_norm"]) > 1e-3


def test_bf16_stays_near_fp32(single, checkpoint, tmp_path):
    found = run_ranks(2, train_losses, checkpoint, tmp_path, bf16=True, **OVERLAP)[0]
    assert worst(single["loss"], found["loss"]) < 2e-2
