"""Experts, latent attention and prediction layers train alike on every layout, and their losses are logged apart."""

from pathlib import Path
from typing import Any

import pytest

from harness import run_ranks
from reference import make_reference
from train_cases import arguments, history, quietly

pytestmark = pytest.mark.ranks

KEYS = ("loss", "grad_norm", "eval_loss", "moe_load_balancing_loss", "mtp_1_loss")
AUX = {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "aux_loss"}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
# case -> settings of all its runs, layouts
CASES: dict[str, tuple[dict[str, Any], dict[str, tuple[int, dict[str, Any]]]]] = {
    "qwen3_moe": (
        {},
        {
            "ep2": (2, {"expert_model_parallel_size": 2, "gradient_accumulation_steps": 2}),
            "pp2": (2, {"pipeline_model_parallel_size": 2}),
            "tp2-sp-etp2": (2, SP | {"expert_tensor_parallel_size": 2}),
        },
    ),
    "deepseek_v3": ({}, {"pp2": (2, {"pipeline_model_parallel_size": 2}), "tp2-sp": (2, SP)}),
}


def tokens(count: int) -> Any:
    import numpy as np

    from mca_train import TokenDataset

    draw = np.random.default_rng(count)
    return TokenDataset.from_samples([(draw.integers(0, 64, 16), np.ones(16, bool)) for _ in range(count)])


def losses(checkpoint: Path, output: Path, **changes: Any) -> dict[str, list[float]]:
    from mca_models import AutoModel
    from mca_train import McaTrainer

    run = {"max_steps": 3, "learning_rate": 1e-3, "gradient_accumulation_steps": 4, "warmup_steps": 0}
    args = arguments(output, **(run | changes))
    model = AutoModel.from_pretrained(checkpoint, args)
    trainer = quietly(
        lambda: McaTrainer(model=model, args=args, train_dataset=tokens(8), eval_dataset=tokens(4))
    )
    quietly(trainer.train)
    quietly(trainer.evaluate)
    return {key: history(trainer, key) for key in KEYS}


def worst(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other)
    return max((abs(a - b) / abs(a) for a, b in zip(one, other, strict=True)), default=0.0)


@pytest.mark.parametrize("case", CASES)
def test_losses_equal_the_single_process_run(case, tmp_path):
    checkpoint = make_reference(case, tmp_path).path
    settings, layouts = CASES[case]
    single = run_ranks(1, losses, checkpoint, tmp_path / "one", **settings)[0]
    assert len(single["loss"]) == 3
    for name, (size, changes) in layouts.items():
        found = run_ranks(size, losses, checkpoint, tmp_path / name, **(settings | changes))
        for key in ("loss", "grad_norm", "eval_loss", "mtp_1_loss"):
            assert worst(single[key], found[0][key]) < 1e-4, (name, key)
        assert all(rank["loss"] == found[0]["loss"] for rank in found)


def test_balancing_losses_are_logged_apart(tmp_path):
    checkpoint = make_reference("qwen3_moe", tmp_path).path
    single = run_ranks(1, losses, checkpoint, tmp_path / "one", **AUX)[0]
    staged = run_ranks(2, losses, checkpoint, tmp_path / "two", pipeline_model_parallel_size=2, **AUX)
    assert len(single["moe_load_balancing_loss"]) == 3
    assert min(single["moe_load_balancing_loss"]) > 0.5  # 1 where all experts get as much
    for rank in staged:
        assert worst(single["moe_load_balancing_loss"], rank["moe_load_balancing_loss"]) < 1e-4
        assert worst(single["loss"], rank["loss"]) < 1e-4


def predicting(checkpoint: Path, output: Path, **changes: Any) -> dict[str, list[float]]:
    """A random model with a prediction layer."""
    import json

    from mca_models import AutoModel
    from mca_models.templates import config_from_hf
    from mca_train import McaTrainer

    run = {"max_steps": 3, "learning_rate": 1e-3, "gradient_accumulation_steps": 8, "warmup_steps": 0}
    args = arguments(output, **(run | changes))
    described = json.loads((checkpoint / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    model = AutoModel.from_config(config_from_hf(described), args, dtype="float32")
    trainer = quietly(lambda: McaTrainer(model=model, args=args, train_dataset=tokens(8), pack_length=32))
    quietly(trainer.train)
    return {key: history(trainer, key) for key in KEYS}


def test_prediction_losses_are_logged_apart_and_packing_changes_nothing(tmp_path):
    checkpoint = make_reference("deepseek_v3", tmp_path).path
    single = run_ranks(1, predicting, checkpoint, tmp_path / "one")[0]
    assert len(single["mtp_1_loss"]) == 3
    assert single["mtp_1_loss"] != single["loss"]
    others = {
        "pp2": (2, {"pipeline_model_parallel_size": 2}),
        "packed": (1, {"sequence_packing": True}),
    }
    for name, (size, changes) in others.items():
        for rank in run_ranks(size, predicting, checkpoint, tmp_path / name, **changes):
            for key in ("loss", "grad_norm", "mtp_1_loss"):
                assert worst(single[key], rank[key]) < 1e-4, (name, key)
