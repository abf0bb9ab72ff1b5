"""One process of McaTrainer is the Hugging Face Trainer on the Hugging Face model."""

import os
from pathlib import Path
from typing import Any

import pytest

from harness import run_ranks
from loss_curves import SMALL
from train_cases import arguments, history, make_trainer, quietly, samples, tiny_checkpoint

pytestmark = [pytest.mark.ranks, pytest.mark.one_fork]

COMMON = {"train_sampling_strategy": "sequential", "max_grad_norm": 0.5, "gradient_accumulation_steps": 4}
COMMON |= {"learning_rate": 3e-3}


def intervening() -> Any:
    """A callback that changes a step's rate and all later steps' decay; of a class that mca-train replaces."""
    from transformers import PrinterCallback

    class Intervening(PrinterCallback):
        logs = 0

        def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            for group in parts["optimizer"].param_groups:
                if state.global_step == 2:
                    group["lr"] = 1.0
                if state.global_step == 3 and group["weight_decay"]:
                    group["weight_decay"] = 0.5

        def on_log(self, *_: Any, **__: Any) -> None:
            self.logs += 1

    return Intervening()


def with_hugging_face(checkpoint: Path, output_dir: Path, **changes: Any) -> dict[str, Any]:
    import torch
    from transformers import Qwen3ForCausalLM, Trainer, TrainingArguments

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    ours = arguments(output_dir, **(COMMON | changes))
    names = [field for field in TrainingArguments.__dataclass_fields__ if field in vars(ours)]
    same = {n: getattr(ours, n) for n in names if n not in ("accelerator_config", "mixed_precision")}
    init = {n: v for n, v in same.items() if TrainingArguments.__dataclass_fields__[n].init}
    model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**init),
        train_dataset=samples(22),
        data_collator=lambda rows: {k: v[None] for k, v in rows[0].items()},
        callbacks=[intervening()] if same["optim"] == "sgd" else None,
    )
    quietly(trainer.train)
    model.eval()
    total, targets = 0.0, 0
    with torch.no_grad():
        for row in samples(7, seed=9):
            labels = row["labels"][1:]
            logits = model(row["input_ids"][None]).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            targets += int((labels != -100).sum())
    keys = ("loss", "grad_norm", "learning_rate", "epoch")
    return {key: history(trainer, key) for key in keys} | {"eval": total / targets}


def with_megatron(checkpoint: Path, output_dir: Path, **changes: Any) -> dict[str, Any]:
    from mca_config.errors import McaError

    callback = intervening()
    if changes.get("optim") == "sgd":
        changes["callbacks"] = [callback]
    trainer = make_trainer(checkpoint, output_dir, **(COMMON | changes))
    quietly(trainer.train)
    with pytest.raises(McaError, match=r"a callback reads parameters of its model, .* use trainer\.model"):
        list(trainer.callback_handler.model.parameters())
    keys = ("loss", "grad_norm", "learning_rate", "epoch")
    found = {key: history(trainer, key) for key in keys} | {"logs": callback.logs}
    return found | {"eval": quietly(trainer.evaluate)["eval_loss"]}


@pytest.mark.cases(0, always=["adam"])
@pytest.mark.parametrize(
    ("tied", "steps", "changes"),
    [
        (False, 9, {}),
        (False, 50, {}),
        (True, 5, {}),
        (False, 5, {"optim": "sgd", "learning_rate": 0.3}),
    ],
    ids=["adam", "longer", "tied", "sgd"],
)
def test_losses_gradients_and_schedule_equal_hugging_faces(tied, steps, changes, tmp_path):
    checkpoint = tiny_checkpoint(tmp_path / "model", tie_word_embeddings=tied, **SMALL)
    run = changes | {"max_steps": steps}
    theirs = run_ranks(1, with_hugging_face, checkpoint, tmp_path / "hf", process_group=False, **run)[0]
    ours = run_ranks(1, with_megatron, checkpoint, tmp_path / "mca", **run)[0]
    assert len(ours["loss"]) == steps
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    assert ours["learning_rate"] == pytest.approx(theirs["learning_rate"], rel=1e-6, abs=1e-12)
    assert ours["epoch"] == pytest.approx(theirs["epoch"])
    assert ours["logs"] == (steps + 1 if "optim" in changes else 0), "a callback of a class that is replaced"
    assert ours["eval"] == pytest.approx(theirs["eval"], rel=1e-4)
