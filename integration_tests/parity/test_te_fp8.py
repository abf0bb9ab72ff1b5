"""Training in fp8 over Transformer Engine's modules: its scales resume with the run, sizes are checked by name.

Rounding and products are emulated (`emulated_fp8`); recipes, histories and their reduction over ranks are not.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file

from emulated_te import needs_te, run_emulated
from layouts import arguments
from mca_config.errors import McaError
from mca_config.types import JsonObject
from mca_train.checkpoint import fp8_scales
from reference import hf_model
from train_cases import arguments as train_arguments
from train_cases import (
    history,
    make_trainer,
    quietly,
    samples,
    sparse_checkpoint,
    stop_and_resume,
    tiny_checkpoint,
    tokens,
    train_losses,
)
from train_settings import CP, PP, SP

pytestmark = [pytest.mark.ranks, needs_te]

FP8 = {"fp8": "hybrid", "additional_configs": {"fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}}
TENSORWISE = {"fp8": "e4m3", "fp8_recipe": "tensorwise"}
SHORT = {"max_steps": 3}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RESUMED: dict[str, dict[str, Any]] = {
    "tp2-sp": SP,
    "cp2-evaluated": CP | {"eval_strategy": "steps", "eval_steps": 2},
    "stage-without-layers": PP | {"pipeline_model_parallel_layout": "Ett|L"},
}


def test_resuming_under_delayed_scaling_changes_no_bit(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", num_hidden_layers=2)
    for name, each in RESUMED.items():
        # in processes of its own: Transformer Engine goes on to agree over the groups of an earlier layout
        settings = FP8 | SHORT | each
        for found in run_emulated(2, stop_and_resume, checkpoint, tmp_path / name, 2, **settings):
            assert found["resumed"] == found["straight"], name
            assert found["state"] == {"steps": 3, "equal_weights": True}, name
    for name in RESUMED:
        (file,) = (tmp_path / name / "checkpoint-2" / "training").glob("fp8_*")
        scales = {
            key: scale
            for key, scale in load_file(file).items()
            if key.endswith("linear_fc2.scaling_bwd.scale")
        }
        assert set(scales) == {
            f"decoder.layers.{layer}.mlp.linear_fc2.scaling_bwd.scale" for layer in range(2)
        }
        assert min(float(scale.max()) for scale in scales.values()) > 1  # gradients are small


def under_blocks(checkpoint: Path, folder: Path, recipe: str) -> tuple[dict[str, Any], list[float]]:
    """Return the log of a resumed run with a recipe of blocks, and its losses without fp8."""
    from transformer_engine.pytorch import quantization

    quantization._MXFP8_SUPPORT = (True, "")  # not an H100, then
    rows = samples(44, longest=16)  # fewer tokens than a block has
    short = {**SHORT, "train_dataset": rows, "gradient_accumulation_steps": 8}
    plain = train_losses(checkpoint, folder / "plain", **short)
    settings = {"fp8": "hybrid", "fp8_recipe": recipe}
    return stop_and_resume(checkpoint, folder / recipe, 2, **settings, **short), plain["loss"]


@pytest.mark.parametrize("recipe", ["mxfp8", "blockwise"])
def test_scales_of_blocks_leave_losses_near_and_nothing_to_keep(
    recipe: str, checkpoint: Path, tmp_path: Path
) -> None:
    ((found, plain),) = run_emulated(1, under_blocks, checkpoint, tmp_path, recipe)
    assert found["resumed"] == found["straight"]
    assert found["state"] == {"steps": 3, "equal_weights": True}
    errors = [abs(loss / exact - 1) for loss, exact in zip(found["straight"]["loss"], plain, strict=True)]
    assert 1e-5 < max(errors) < 2e-3  # a factor has 3 bits; 3e-4 was found
    assert not list((tmp_path / recipe / "checkpoint-2" / "training").glob("fp8_*"))


def refusals(folder: Path) -> list[str]:
    """Return the errors of matrices that fp8 cannot take and of a GPU without a recipe, and the layers in bf16."""
    from mca_models.megatron import AutoModel, platform
    from mca_models.megatron.platform import _device

    narrow = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "intermediate_size": 40}
    said = []
    path = tiny_checkpoint(folder / "narrow", **narrow)
    every = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 2}
    TENSORWISE_KEPT = TENSORWISE | {"additional_configs": every}
    AutoModel.from_pretrained(path, arguments("tp1", **TENSORWISE_KEPT))
    for layout, settings in (("tp1", FP8), ("tp1", {"fp8": "e4m3", "fp8_recipe": "mxfp8"})):
        try:
            AutoModel.from_pretrained(path, arguments(layout, **settings))
        except McaError as error:
            said.append(str(error))
    _device.engine_problem = lambda: None
    platform.fp8_problem.cache_clear()
    try:
        AutoModel.from_pretrained(path, arguments("tp1", fp8="e4m3", fp8_recipe="mxfp8"))
    except McaError as error:
        said.append(str(error))
    return said


def test_what_fp8_cannot_compute_is_named_before_training(tmp_path: Path) -> None:
    ((delayed, mxfp8, gpu),) = run_emulated(1, refusals, tmp_path)
    assert "linear_fc2.weight is 64 x 40 on each tensor rank, and fp8 needs multiples of 16" in delayed
    assert "tensor_model_parallel_size or fp8_recipe" in delayed
    assert "fp8 needs multiples of 32" in mxfp8
    assert "fp8 with fp8_recipe mxfp8 cannot run on this GPU (" in gpu


def begun_anew(model: Path, folder: Path, **changes: Any) -> list[str]:
    """Return the messages about new ranges of a run up to a saved step, or resumed from there. Runs on a rank."""
    checkpoint = folder / "checkpoint-2"
    resume = str(checkpoint) if checkpoint.exists() else None
    settings = FP8 | {"moe_grouped_gemm": False, "save_strategy": "steps", "save_steps": 2} | changes
    trainer = make_trainer(model, folder, max_steps=3 if resume else 2, **settings)
    with mock.patch.object(fp8_scales._log, "warning") as warning:
        quietly(lambda: trainer.train(resume_from_checkpoint=resume))
    return [call.args[0] % call.args[1:] for call in warning.call_args_list]


def test_experts_take_no_others_ranges(tmp_path: Path) -> None:
    """Modules of experts that are computed one by one have names with their number on a rank, not in the model."""
    sizes = {"moe_intermediate_size": 32, "num_hidden_layers": 2, "num_experts_per_tok": 4}
    model = sparse_checkpoint(tmp_path / "model", **sizes)
    alone, halved = {"gradient_accumulation_steps": 2}, {"expert_model_parallel_size": 2}
    folder = tmp_path / "run"
    assert run_emulated(1, begun_anew, model, folder, **alone) == [[]]
    for said in run_emulated(2, begun_anew, model, folder, **halved):
        assert [message.partition(" holds no fp8 scales of ")[2][:11] for message in said] == ["8 modules ("]


def with_mtp(described: JsonObject, folder: Path, recipe: JsonObject) -> list[dict[str, list[float]]]:
    """Losses and gradient norms of a random model with an MTP layer in fp8: as it is, and recomputed."""
    from mca_models import AutoModel
    from mca_models.templates import config_from_hf
    from mca_train import McaTrainer

    found = []
    for changes in ({}, RECOMPUTE):
        args = train_arguments(folder, max_steps=2, gradient_accumulation_steps=2, **recipe, **changes)
        model = AutoModel.from_config(config_from_hf(described), args, dtype="float32")
        trainer = quietly(
            lambda model=model, args=args: McaTrainer(model=model, args=args, train_dataset=tokens(4))
        )
        quietly(trainer.train)
        found.append({key: history(trainer, key) for key in ("loss", "mtp_1_loss", "grad_norm")})
    return found


@pytest.mark.parametrize("recipe", [FP8, TENSORWISE], ids=["delayed", "tensorwise"])
def test_a_recomputed_mtp_layer_has_its_gradients(recipe: JsonObject, tmp_path: Path) -> None:
    described = hf_model("mimo").config.to_dict() | {"num_nextn_predict_layers": 1}
    ((plain, recomputed),) = run_emulated(1, with_mtp, described, tmp_path, recipe)
    assert recomputed == plain
