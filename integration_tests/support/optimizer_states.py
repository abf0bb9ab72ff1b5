"""Runs that tell whether the optimizer's own parameters and state are those that belong to the weights."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from train_cases import history, make_trainer, quietly
from train_settings import DP, ZERO

OFF = {"optimizer_cpu_offload": True}
HALF = OFF | {"optimizer_offload_fraction": 0.5}
PRECISE = {"use_precision_aware_optimizer": True}
BF16 = {"bf16": True}
ONE = {"gradient_accumulation_steps": 1}

LOADED = {"fp32": OFF, "bf16": HALF | BF16, "split": ZERO | OFF, "split bf16": ZERO | HALF | BF16}
LOADED["precise"] = ZERO | PRECISE | HALF | BF16


def after_loading(
    checkpoint: Path, output: Path, cases: dict[str, dict[str, Any]] = LOADED
) -> dict[str, bool]:
    """Return True if a step at rate 0 keeps weights that were loaded under the optimizer after another step."""
    found = {}
    for name, changes in cases.items():
        trainer = make_trainer(
            checkpoint, output / name, max_steps=1, warmup_steps=0, count=8, **changes | ONE
        )
        model, before = trainer.model, dict(trainer.model.export_weights())
        quietly(trainer.train)
        assert any((tensor != before[key]).any() for key, tensor in model.export_weights())
        model.load_weights(before.items())
        trainer.engine.reload_main_params()
        for group in trainer.engine.optimizer.param_groups:
            group["lr"] = 0.0
        trainer.engine.optimizer_step()
        found[name] = all(bool((tensor == before[key]).all()) for key, tensor in model.export_weights())
    return found


def in_fp32(model: Path, output_dir: Path, changes: dict[str, Any]) -> list[Any]:
    """This rank's weights when a run goes on in fp32 that was one in bf16."""
    import torch
    from transformers import TrainerCallback

    begun: list[Any] = []

    class Look(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            begun.extend(tensor.detach().clone() for _, tensor in trainer.model.local_params())

    settings = changes | DP | {"save_strategy": "steps", "save_steps": 1, "warmup_steps": 0}
    first = make_trainer(model, output_dir, max_steps=1, bf16=True, **settings)
    quietly(first.train)
    settings |= {"save_strategy": "no"}
    trainer = make_trainer(model, output_dir, max_steps=2, callbacks=[Look()], **settings)
    quietly(lambda: trainer.train(resume_from_checkpoint=True))
    assert all(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in begun), "masters"
    for (_, half), tensor in zip(first.model.local_params(), begun, strict=True):
        assert torch.equal(half, tensor.bfloat16()), "of another parameter"
    return [tensor.tolist() for tensor in begun]


def resumed_before_the_first_update(
    checkpoint: Path,
    output_dir: Path,
    cases: Sequence[dict[str, Any]] = ({}, {"use_distributed_optimizer": True}),
) -> list[tuple[Any, Any]]:
    """Logs of a run whose first steps are skipped, and of those that go on from its first checkpoint.

    These are a new trainer, and the one that has made updates since.
    """
    found = []
    for number, changes in enumerate(cases):
        run = {"fp16": True, "initial_loss_scale": 2.0**14, "hysteresis": 1, "loss_scale_window": 9}
        run |= {"max_steps": 6} | changes
        folder = output_dir / str(number)
        straight = make_trainer(checkpoint, folder, save_strategy="steps", save_steps=1, **run)
        quietly(straight.train)
        keys = ("loss", "grad_norm", "loss_scale", "skipped_steps")
        curve = {key: history(straight, key) for key in keys}
        straight.args.save_strategy = "no"
        for resumed in (make_trainer(checkpoint, folder, **run), straight):
            quietly(partial(resumed.train, resume_from_checkpoint=str(folder / "checkpoint-1")))
            found += [(curve, {key: history(resumed, key) for key in keys})]
    return found
