"""Training over Transformer Engine's layers is training over the local ones; each resumes what the other saved."""

from pathlib import Path
from typing import Any

import pytest

import train_cases
from emulated_te import needs_te, run_emulated
from loss_curves import worst
from optimizer_states import after_loading, in_fp32, resumed_before_the_first_update
from reference import make_reference
from reshard_runs import FIRST, run
from train_cases import filled_packs, stop_and_resume, tokens, train_losses
from train_settings import CP, DP, EP, ETP1, SP, TORCH_DIST, TP, ZERO

pytestmark = [pytest.mark.ranks, needs_te]

LOCAL = {"transformer_impl": "local"}
SHORT = {"max_steps": 3, "max_grad_norm": 0.5}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MODULES = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp"]}
PACKS = {"sequence_packing": True, "pack_length": 32}
DENSE: dict[str, dict[str, Any]] = {
    "tp2-sp": SP,
    "dp2-split": ZERO | {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "dp2-split-bf16": ZERO | {"bf16": True},
    "tp2-recompute": TP | RECOMPUTE,
    "tp2-sp-recompute-modules": SP | MODULES,
    "tp2-packed": TP | PACKS,
    "cp2-packed": CP | PACKS,
}
SPARSE: dict[str, dict[str, Any]] = {
    "ep2-split": EP | ZERO,
    "tp2-sp-ep2-etp1": SP | EP | ETP1,
    "ep2-recompute-modules": EP | ZERO | {**MODULES, "recompute_modules": ["moe", "core_attn"]},
}
STEPS = FIRST + 3


def both(model: Path, folder: Path, jobs: dict[str, dict[str, Any]], data: bool) -> dict[str, Any]:
    """Losses and norms of gradients over Transformer Engine's layers and over local ones. Runs on every rank."""
    found = {}
    for name, changes in jobs.items():
        settings: dict[str, Any] = SHORT | changes
        if data:
            settings["train_dataset"] = tokens(24)
            settings["eval_dataset"] = tokens(4)
        elif "pack_length" in changes:
            settings["train_dataset"] = filled_packs(24, 3)
        found[name] = [
            train_losses(model, folder / f"{name}-{kind}", **settings, **choice)
            for kind, choice in (("engine", {}), ("local", LOCAL))
        ]
    return found


def assert_alike(found: dict[str, Any]) -> None:
    for name, (engine, local) in found.items():
        tolerance = 2e-2 if "bf16" in name else 1e-5
        for key in ("loss", "grad_norm", "eval_loss"):
            assert worst(local[key], engine[key]) < tolerance, (name, key, local[key], engine[key])
        assert len(engine["loss"]) == SHORT["max_steps"]


def test_dense_models_train_alike(checkpoint: Path, tmp_path: Path) -> None:
    assert_alike(run_emulated(2, both, checkpoint, tmp_path, DENSE, False, timeout=400)[0])


def test_experts_train_alike(tmp_path: Path) -> None:
    model = make_reference("qwen3_moe", tmp_path / "model").path
    assert_alike(run_emulated(2, both, model, tmp_path, SPARSE, True, timeout=400)[0])


def test_the_norm_counts_the_down_projections_of_latent_attention_once(tmp_path: Path) -> None:
    model = make_reference("deepseek_v3", tmp_path / "model").path
    found = run_emulated(2, both, model, tmp_path, {"tp2-sp-latent": SP}, True)[0]
    assert_alike(found)
    one = run_emulated(1, both, model, tmp_path, {"one-latent": {}}, True)[0]
    assert worst(one["one-latent"][0]["grad_norm"], found["tp2-sp-latent"][0]["grad_norm"]) < 1e-4


@pytest.mark.parametrize("changes", [SP, ZERO | TORCH_DIST], ids=["tp2-sp", "dp2-split-torch-dist"])
def test_resuming_changes_no_bit(changes: dict[str, Any], checkpoint: Path, tmp_path: Path) -> None:
    for found in run_emulated(2, stop_and_resume, checkpoint, tmp_path, **changes):
        assert found["resumed"] == found["straight"]
        assert found["state"] == {"steps": train_cases.STEPS, "equal_weights": True}


RESUMED: dict[str, dict[str, Any]] = {
    "qwen3_moe": EP | ZERO | DP,
    "deepseek_v3": SP | TORCH_DIST,
    "qwen3_next": TP | EP | ETP1 | SP | TORCH_DIST,
}


def handed_over(model: Path, folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Curves of runs over either kind of layers, and of each from the other's checkpoint. Runs on every rank."""
    kinds = {"engine": {}, "local": LOCAL}
    changes = changes | {"data": lambda: tokens(96)}
    found = {kind: run(model, folder / kind, STEPS, **changes | choice) for kind, choice in kinds.items()}
    for kind, choice in kinds.items():
        (other,) = kinds.keys() - {kind}
        before = folder / other / f"checkpoint-{FIRST}"
        found[f"{kind}-after-{other}"] = run(
            model, folder / f"{kind}-after-{other}", STEPS, before, **changes | choice
        )
    return found


@pytest.mark.parametrize("case", RESUMED)
def test_either_kind_of_layers_goes_on_from_the_others_checkpoint(case: str, tmp_path: Path) -> None:
    model = make_reference(case, tmp_path / "model").path
    found = run_emulated(2, handed_over, model, tmp_path, RESUMED[case], timeout=400)[0]
    for name in ("engine", "engine-after-local", "local-after-engine"):
        for key in ("loss", "grad_norm"):
            assert len(found[name][key]) == STEPS
            assert worst(found["local"][key], found[name][key]) < 1e-4, (name, key, found)


PRECISE = {"use_precision_aware_optimizer": True}


def precisely(model: Path, folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Curves of runs whose optimizer holds the fp32 weights, or not, and of each from the other's checkpoint."""
    kinds: dict[str, dict[str, Any]] = {"plain": {}, "precise": PRECISE}
    changes = ZERO | DP | changes
    found = {kind: run(model, folder / kind, STEPS, **changes | choice) for kind, choice in kinds.items()}
    for before in kinds:
        for kind, choice in kinds.items():
            on, checkpoint = f"{kind}-after-{before}", folder / before / f"checkpoint-{FIRST}"
            found[on] = run(model, folder / on, STEPS, checkpoint, **changes | choice)
    return found


@pytest.mark.parametrize("changes", [{"bf16": True}, {}], ids=["bf16", "fp32"])
def test_the_masters_of_a_precision_aware_optimizer_go_on(
    changes: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    """In a checkpoint they are fp32 weights, not what Transformer Engine keeps of them beside those of the model."""
    found = run_emulated(2, precisely, checkpoint, tmp_path, changes)[0]
    for name, curves in found.items():
        assert curves == found["plain"], name


def alone(model: Path, folder: Path) -> dict[str, Any]:
    """Return the findings of one rank about Transformer Engine's optimizers."""
    precise = ZERO | PRECISE
    changes = {"max_steps": 4, "at": 2, "gradient_accumulation_steps": 1}
    sgd = stop_and_resume(model, folder / "sgd", **changes, optimizer="sgd")
    (straight, resumed), *_ = resumed_before_the_first_update(model, folder / "fp16", [precise])
    return {
        "loaded": after_loading(
            model, folder / "loaded", {"bf16": precise | {"bf16": True}, "fp32": precise}
        ),
        "sgd": sgd["resumed"] == sgd["straight"],
        "skipped": straight["skipped_steps"],
        "before the first update": resumed == straight,
        "in fp32": in_fp32(model, folder / "in fp32", precise),
    }


def test_loading_and_resuming(checkpoint: Path, tmp_path: Path) -> None:
    (found,) = run_emulated(1, alone, checkpoint, tmp_path)
    assert found["loaded"] == {"bf16": True, "fp32": True}, "of weights under the optimizer"
    assert found["sgd"], "its own, not Transformer Engine's, keeps nothing without momentum"
    assert found["skipped"][0] == 1
    assert 0 in found["skipped"]
    assert found["before the first update"]
    assert found["in fp32"]
