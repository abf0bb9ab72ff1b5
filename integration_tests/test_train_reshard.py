"""A run stopped on one layout goes on upon another, or with another split of its optimizer, as if it had not."""

from pathlib import Path
from typing import Any

import pytest

from harness import run_ranks
from test_train_layouts import CP, OVERLAP, PP, SP, TP, VPP, ZERO, worst
from test_train_resume import ASYNC
from train_cases import history, make_trainer, quietly, tiny_checkpoint

pytestmark = pytest.mark.ranks

FIRST, ALL = 4, 24
EP = {"expert_model_parallel_size": 2}
TORCH_DIST = {"ckpt_format": "torch_dist"}
HALF = {"gradient_accumulation_steps": 2}  # on two replicas


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), vocab_size=131)  # padded at tensor size 2


def run(checkpoint: Path, output_dir: Path, steps: int, **changes: Any) -> dict[str, Any]:
    """Up to ``steps`` from the last checkpoint, if there is one; the first run leaves one."""
    settings = {"lr_scheduler_type": "constant", "learning_rate": 2e-3, "gradient_accumulation_steps": 4}
    saving = {"save_strategy": "steps", "save_steps": FIRST} if steps == FIRST else {}
    trainer = make_trainer(checkpoint, output_dir, count=200, max_steps=steps, **settings | saving | changes)
    quietly(lambda: trainer.train(resume_from_checkpoint="auto"))
    return {key: history(trainer, key) for key in ("loss", "grad_norm")}


@pytest.fixture(scope="module")
def straight(checkpoint, tmp_path_factory):
    return run_ranks(1, run, checkpoint, tmp_path_factory.mktemp("straight"), ALL)[0]


TRANSITIONS = {
    "tp2-dp2 to pp2": ((4, TP | HALF | TORCH_DIST), (2, PP)),
    "split dp2 to tp2": ((2, OVERLAP | HALF | ASYNC), (2, TP)),
    "one rank to split tp2 dp2": ((1, {}), (4, SP | OVERLAP | HALF)),
    "tp2 to one rank": ((2, SP), (1, {})),
    "cp2 to pp2-vpp2 split dp2": ((2, CP), (4, OVERLAP | VPP | HALF)),
}


@pytest.mark.parametrize("name", TRANSITIONS)
def test_the_loss_curve_goes_on(name, straight, checkpoint, tmp_path):
    (size, before), (other, after) = TRANSITIONS[name]
    run_ranks(size, run, checkpoint, tmp_path, FIRST, **before)
    resumed = run_ranks(other, run, checkpoint, tmp_path, ALL, **after)[0]
    assert len(resumed["loss"]) == ALL
    assert worst(straight["loss"], resumed["loss"]) < 1e-4


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    from reference import make_reference

    return make_reference("qwen3_moe", tmp_path_factory.mktemp("experts")).path


EXPERT_STEPS = 12
EXPERTS = {
    "experts on one rank to two": ((1, {}), (2, EP | ZERO | HALF)),
    "split experts to one rank": ((2, EP | ZERO | HALF), (1, {})),
    "experts exactly": ((2, EP | HALF), (2, EP | HALF)),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_go_on(name, experts, tmp_path):
    from test_train_moe import tokens

    (size, before), (other, after) = EXPERTS[name]
    data = {"train_dataset": tokens(96)}
    run_ranks(size, run, experts, tmp_path, FIRST, **before, **data)
    straight = run_ranks(size, run, experts, tmp_path / "straight", EXPERT_STEPS, **before, **data)[0]
    resumed = run_ranks(other, run, experts, tmp_path, EXPERT_STEPS, **after, **data)[0]
    if before == after:
        assert resumed == straight
    assert worst(straight["loss"], resumed["loss"]) < 1e-4
