"""Muon: megatron-core 0.19 builds it, with the package emerging-optimizers."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import reference
from harness import run_ranks
from mca_models.megatron import platform
from train_cases import arguments, stop_and_resume, tiny_checkpoint, train_losses

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(find_spec("emerging_optimizers") is None, reason="needs mca-train[muon], Python 3.12"),
    pytest.mark.skipif(platform.megatron_version() < (0, 19), reason="needs megatron-core 0.19"),
]

MUON: dict[str, Any] = {"optimizer": "muon"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


def test_muon_learns_and_resumes_bit_for_bit(checkpoint, tmp_path):
    (found,) = run_ranks(1, stop_and_resume, checkpoint, tmp_path, **MUON)
    losses = found["straight"]["loss"]
    assert losses[-1] < 0.9 * losses[0]
    assert found["resumed"]["loss"] == losses


def resumed_twice(checkpoint: Path, output: Path) -> list[Any]:
    """Losses of a run, and of one that goes on from the checkpoint of one that went on."""
    from train_cases import history, make_trainer, quietly

    found = []
    for steps, resume in ((1, None), (2, True), (3, True), (3, None)):
        changes = MUON | {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
        folder = output / ("straight" if (steps, resume) == (3, None) else "parts")
        trainer = make_trainer(checkpoint, folder, max_steps=steps, warmup_steps=0, **changes)
        quietly(lambda trainer=trainer, resume=resume: trainer.train(resume_from_checkpoint=resume))
        found.append(history(trainer, "loss"))
    return found[-2:]


def test_a_resumed_run_saves_and_is_resumed(checkpoint, tmp_path):
    ((resumed, straight),) = run_ranks(1, resumed_twice, checkpoint, tmp_path)
    assert resumed == straight


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


def splits(path: Path, output: Path, **settings: Any) -> list[tuple[int, Any]]:
    """Rows of each layer's queries, keys and values on this rank, and how the optimizer splits them."""

    from mca_models import AutoModel
    from mca_train.engine.engine import Engine

    args = arguments(output, **MUON, **settings)
    model = AutoModel.from_pretrained(path, args)
    engine = Engine(model.chunks, args, lambda output, batch: (output.sum(), batch.loss_mask.sum()))
    used = {id(each) for group in engine.optimizer.param_groups for each in group["params"]}
    found = []
    for layer in model.chunks[0].decoder.layers:
        weight = layer.self_attention.linear_qkv.weight
        optimized = getattr(weight, "main_param", None) if settings else weight
        assert id(optimized) in used
        found.append((len(weight), optimized.qkv_split_shapes if optimized.is_qkv else None))
    return found


# of the first the last two layers take the keys of others; of the second values in full layers are the keys
SPLITS = {
    "gemma4_text-e2b": [(128, [32, 16, 16]), (192, [48, 24, 24]), (64, None), (96, None)],
    "gemma4_text": [(144, [48, 24]), (192, [16, 16, 16]), (144, [48, 24]), (144, [48, 24])],
}


@pytest.mark.cases(0, always=["gemma4_text-e2b", "gemma4_text"])
@pytest.mark.parametrize(
    ("case", "settings"),
    [("gemma4_text-e2b", {}), ("gemma4_text", {"bf16": True})],
    ids=["gemma4_text-e2b", "gemma4_text"],
)
def test_every_layer_is_split_at_its_own_heads(case, settings, tmp_path):
    each = reference.make_reference(case, tmp_path / "model")
    (found,) = run_ranks(1, splits, each.path, tmp_path, **settings)
    assert found == SPLITS[case]
