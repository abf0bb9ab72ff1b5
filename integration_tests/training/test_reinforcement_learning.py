"""The examples of docs/python.md on RL run; losses of log-probabilities are those of cross entropies."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness import run_ranks
from mca_config.errors import McaError
from mca_models.megatron.log_probs.vocabulary import TokenValues
from pages import BLOCK, ON_TWO_RANKS, split_at
from reference import make_reference
from source_tree import ROOT
from train_cases import history, make_trainer, quietly, samples

pytestmark = pytest.mark.ranks


def run_page(path: Path, folder: Path) -> dict[str, Any]:
    """Run all examples of the part on reinforcement learning, one after the other, on every rank."""
    os.chdir(folder)
    names: dict[str, Any] = {"path": path, "engine": {}}
    part, _ = split_at((ROOT / "docs" / "python.md").read_text(), *ON_TWO_RANKS)
    for language, text in BLOCK.findall(part):
        if language == "python":
            exec(compile(text, "example", "exec"), names)
    return {"tensors": len(names["engine"]), "zeros": int((names["found"].log_probs == 0).sum())}


def test_the_page_runs(tmp_path: Path) -> None:
    path = make_reference("qwen3", tmp_path).path
    for found in run_ranks(2, run_page, path, tmp_path):
        assert found == {"tensors": 4 * 11 + 3, "zeros": 2 + 3}


def both_losses(
    checkpoint: Path, folder: Path, changes: dict[str, Any], every_case: bool
) -> list[list[tuple[float, float]]]:
    """Losses and norms of two steps, of cross entropies and of log-probabilities. Runs on every rank."""
    from mca_train import McaTrainer
    from mca_train.data.mixture import Mixture

    class OfLogProbs(McaTrainer):
        token_values = TokenValues()

        def compute_loss(self, output: Tensor, batch: Any, **_: object) -> tuple[Tensor, Tensor]:
            return -(output * batch.loss_mask).sum(), batch.loss_mask.sum().int()

    class WithEntropy(OfLogProbs):
        token_values = TokenValues(entropy=True)

        def compute_loss(self, output: Tensor, batch: Any, **_: object) -> tuple[Tensor, Tensor]:
            assert output.shape == (2, *batch.input_ids.shape)
            assert (output[1] > 0).all()
            return super().compute_loss(output[0], batch)

    found = []
    kinds = (McaTrainer, OfLogProbs, WithEntropy) if every_case else (McaTrainer, WithEntropy)
    for kind in kinds:
        trainer = make_trainer(
            checkpoint,
            folder / kind.__name__,
            kind=kind,
            train_dataset=Mixture([samples(9, longest=24), samples(7, longest=24)], ["a", "b"], None, 0),
            max_steps=2,
            logging_steps=1,
            **{"gradient_accumulation_steps": 2, **changes},
        )
        quietly(trainer.train)
        logged = [log for log in trainer.state.log_history if "loss" in log]
        found.append([(log["loss"], log["grad_norm"]) for log in logged])
        assert any(name.startswith("loss/") for log in logged for name in log) == (kind is McaTrainer)
    return found


@pytest.mark.parametrize(
    "size,changes",
    [
        (
            4,
            {
                "tensor_model_parallel_size": 2,
                "context_parallel_size": 2,
                "sequence_packing": True,
                "loss_chunk_size": 9,
            },
        )
    ],
)
def test_losses_of_log_probs_are_those_of_cross_entropies(
    size: int, changes: dict[str, Any], checkpoint: Path, tmp_path: Path, every_case: bool
) -> None:
    plain, *others = run_ranks(size, both_losses, checkpoint, tmp_path, changes, every_case)[0]
    assert len(plain) == 2
    for other in others:
        assert torch.allclose(torch.tensor(other), torch.tensor(plain), rtol=2e-5), (plain, other)


def between_rounds(checkpoint: Path, folder: Path, resumed: Any) -> None:
    """Tries what may not change between two rounds."""
    some = next(resumed.model.parameters())
    some.requires_grad_(False)
    with pytest.raises(McaError, match=r"requires_grad of parameters changed after the first train\(\)"):
        quietly(resumed.train)
    some.requires_grad_(True)
    resumed.args.freeze = ["language"]
    with pytest.raises(McaError, match=r"freeze changed after the first train\(\)"):
        quietly(resumed.train)
    resumed.args.freeze, resumed.args.adam_beta1 = None, 0.5
    with pytest.raises(McaError, match=r"adam_beta1 changed after the first train\(\)"):
        quietly(resumed.train)
    apart = make_trainer(checkpoint, folder / "apart", max_steps=1, decoupled_lr=2e-3)
    quietly(apart.train)
    apart.args.learning_rate, apart.args.min_lr = 1e-4, 5e-5
    with pytest.raises(McaError, match=r"learning_rate, min_lr changed after the first train\(\)"):
        quietly(apart.train)


def in_rounds(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Six steps at once, and two rounds of three steps each on what the dataset then holds."""
    from transformers import TrainerCallback

    from mca_train import McaTrainer

    class InRounds(McaTrainer):
        metric_names = ("round",)
        round = 0

        def compute_loss(self, output: Tensor, batch: Any, **_: object) -> tuple[Tensor, Tensor]:
            self.metrics.add({"round": torch.tensor(float(self.round))}, 1)
            return super().compute_loss(output, batch)

    class EndsAtStep4(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step == 4

    data = samples(24, longest=24)
    changes = {"lr_scheduler_type": "constant", "warmup_steps": 0, "gradient_accumulation_steps": 4}
    changes |= {"train_sampling_strategy": "sequential", "train_dataset": data}
    whole = make_trainer(checkpoint, folder / "whole", max_steps=6, **changes)
    quietly(whole.train)

    def new() -> Any:
        saving = {"max_steps": 3, "logging_steps": 5, "save_strategy": "steps"}
        return make_trainer(checkpoint, folder / "rounds", kind=InRounds, **changes | saving)

    def losses(**changed: Any) -> list[float]:
        other = make_trainer(checkpoint, folder / "other", **changes | changed)
        other.add_callback(EndsAtStep4())
        quietly(other.train)
        return history(other, "loss")

    trainer = new()
    found: dict[str, Any] = {"whole": history(whole, "loss"), "loss": [], "round": []}
    for trainer.round in (0, 1):
        first = 12 * trainer.round
        trainer.train_dataset = torch.utils.data.Subset(data, range(first, first + 12))
        quietly(trainer.train)
        for key in ("loss", "round"):
            found[key] += history(trainer, key)
    found["ended"] = losses(logging_steps=5, max_steps=6)
    found["no logs"] = losses(logging_strategy="no", max_steps=1)
    resumed = new()
    quietly(lambda: resumed.train(resume_from_checkpoint="auto"))
    resumed.args.learning_rate, resumed.args.min_lr = 1e-5, 1e-6
    quietly(resumed.train)
    groups = resumed.optimizer.param_groups
    found["rates"] = {group[name] for group in groups for name in ("lr", "max_lr", "min_lr")}
    between_rounds(checkpoint, folder, resumed)
    lines = (folder / "rounds" / "train_log.jsonl").read_text().splitlines()
    found["logged"] = [entry.get("rounds_before", 0) for entry in map(json.loads, lines) if "loss" in entry]
    found["checkpoints"] = [path.name for path in (folder / "rounds").glob("checkpoint-*")]
    return found


def test_a_loop_outside_trains_round_by_round(checkpoint: Path, tmp_path: Path) -> None:
    found = run_ranks(1, in_rounds, checkpoint, tmp_path)[0]
    whole = found["whole"]
    assert len(whole) == 6, "the last step is logged once"
    first_and_last = [whole[0], sum(whole[1:3]) / 2, whole[3], sum(whole[4:6]) / 2]
    assert found["loss"] == pytest.approx(first_and_last, rel=1e-6)
    assert found["round"] == [0.0, 0.0, 1.0, 1.0], "nothing of the first round is in the second's log"
    assert found["logged"] == [0, 0, 1, 1, 2, 2]
    assert found["ended"] == pytest.approx([whole[0], sum(whole[1:4]) / 3], rel=1e-6)
    assert found["no logs"] == []
    assert found["rates"] == {1e-5, 1e-6}, "those of the arguments, which changed"
    assert found["checkpoints"] == ["checkpoint-3"]


def learn(rounds: int, folder: Path) -> list[float]:
    """The example's mean rewards. Runs on every rank."""
    spec = importlib.util.spec_from_file_location("grpo", ROOT / "examples" / "grpo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rewards: list[float] = module.train(str(folder), 2, 2, rounds)
    return rewards


@pytest.mark.qualify
def test_the_example_learns_from_rewards(tmp_path: Path) -> None:
    for rewards in run_ranks(4, learn, 30, tmp_path, timeout=300):
        assert len(rewards) == 30
        assert sum(rewards[-5:]) / 5 > rewards[0] + 0.4, rewards
