"""A run goes on in another precision, or from main parameters that are not its weights, with the exact weights."""

from pathlib import Path
from typing import Any

import pytest

from harness import run_ranks
from optimizer_states import in_fp32
from reshard_runs import WITH_EXPERTS, adapter_of
from train_cases import history, make_trainer, quietly, tiny_checkpoint, tokens
from train_settings import TORCH_DIST, ZERO

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_checkpoint(
        tmp_path_factory.mktemp("model"), vocab_size=131, num_hidden_layers=2
    )  # padded at tensor size 2


@pytest.mark.cases(0, always=["split"])  # its replicas hold shards of the optimizer
@pytest.mark.parametrize("changes", [ZERO, {}], ids=["split", "whole"])
def test_ranks_go_on_in_fp32_with_the_same_weights(changes, model, tmp_path):
    first, second = run_ranks(2, in_fp32, model, tmp_path, changes)
    assert first and first == second


def resumed_with_shards(model: Path, output_dir: Path) -> tuple[Any, Any]:
    """Return this rank's shards of main parameters and Adam's state: those saved, those that a resumed run has."""
    from transformers import TrainerCallback

    class Look(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            begun.update(optimizer_shards(trainer))

    begun: dict[str, Any] = {}
    settings = ZERO | {"bf16": True, "save_strategy": "steps", "save_steps": 1, "warmup_steps": 0}
    first = make_trainer(model, output_dir, max_steps=1, **settings)
    quietly(first.train)
    settings |= {"save_strategy": "no"}
    trainer = make_trainer(model, output_dir, max_steps=2, callbacks=[Look()], **settings)
    quietly(lambda: trainer.train(resume_from_checkpoint=True))
    return optimizer_shards(first), begun


def optimizer_shards(trainer: Any) -> dict[str, Any]:
    """Return the fp32 shards on this rank by parameter and kind, as lists of bits."""
    import torch

    (single,) = trainer.engine.optimizer.chained_optimizers
    found = {}
    for name, param in trainer.model.trained_parameters():
        if (main := getattr(param, "main_param", None)) is not None:
            kept = {"main": main} | single.optimizer.state[main]
            for kind in ("main", "exp_avg", "exp_avg_sq"):
                assert kept[kind].dtype == torch.float32
                found[f"{name} {kind}"] = kept[kind].detach().view(torch.int32).tolist()
    return found


def test_shards_of_main_parameters_and_adams_state_resume_bit_for_bit(model, tmp_path):
    ranks = run_ranks(2, resumed_with_shards, model, tmp_path)
    assert all(saved == begun for saved, begun in ranks)
    saved = [bits for shards, _ in ranks for name, bits in shards.items() if name.endswith(" main")]
    assert any(each & 0xFFFF for bits in saved for each in bits), "not the rounded weights"
    assert ranks[0][0].keys() != ranks[1][0].keys(), "each rank has its own shards"


def in_half(model: Path, output_dir: Path, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return True if the main parameters of bf16 runs begin as the fp32 weights of the run that they resume."""
    import torch
    from transformers import TrainerCallback

    class Look(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            begun.update(
                (name, half.main_param.reshape(-1).clone())
                for name, half in trainer.model.trained_parameters()
            )

    found = {}
    for name, changes in cases.items():
        settings = {"save_strategy": "steps", "save_steps": 1, "warmup_steps": 0} | changes
        settings["gradient_accumulation_steps"] = 1
        first = make_trainer(model, output_dir / name, max_steps=1, **settings)
        quietly(first.train)
        exact = {name: tensor.detach().reshape(-1) for name, tensor in first.model.trained_parameters()}
        begun: dict[str, Any] = {}
        settings |= {"bf16": True, "use_distributed_optimizer": "split" in name, "save_strategy": "no"}
        trainer = make_trainer(model, output_dir / name, max_steps=2, callbacks=[Look()], **settings)
        quietly(lambda trainer=trainer: trainer.train(resume_from_checkpoint=True))
        assert begun.keys() == exact.keys() != set()
        found[name] = all(torch.equal(begun[key], tensor) for key, tensor in exact.items())
    return found


def test_main_parameters_begin_as_the_weights_of_a_run_in_fp32(tmp_path):
    model, adapter = adapter_of("qwen3_moe", tmp_path, **WITH_EXPERTS)
    whole = {"train_dataset": tokens(8)}
    cases = {"split": whole, "adapter": whole | {"adapter": adapter}, "torch_dist": whole | TORCH_DIST}
    assert run_ranks(1, in_half, model, tmp_path / "run", cases) == [dict.fromkeys(cases, True)]


def trained_again(model: Path, output_dir: Path) -> list[Any]:
    """Curves from a checkpoint without masters, of a new trainer and of one that has trained already."""
    settings = {"max_steps": 2, "warmup_steps": 0, "gradient_accumulation_steps": 2}
    saving = settings | {"save_strategy": "steps", "save_steps": 1}
    quietly(make_trainer(model, output_dir / "fp32", **saving).train)
    checkpoint, found = str(output_dir / "fp32" / "checkpoint-1"), []
    for name in ("new", "old"):
        trainer = make_trainer(model, output_dir / name, bf16=True, max_grad_norm=0.1, **settings)
        if name == "old":
            quietly(trainer.train)
        quietly(lambda trainer=trainer: trainer.train(resume_from_checkpoint=checkpoint))
        weights = {key: tensor.tolist() for key, tensor in trainer.model.canonical_parameters()}
        found.append((history(trainer, "loss"), weights))
    return found


@pytest.mark.qualify
def test_a_trainer_that_has_trained_goes_on_from_the_weights_of_a_checkpoint(model, tmp_path):
    ((new, old),) = run_ranks(1, trained_again, model, tmp_path)
    assert new == old
