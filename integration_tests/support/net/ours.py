"""A case on ranks, by ``McaTrainer``; everything here runs on every rank."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from transformers import TrainerCallback

from mca_config.errors import McaError
from net.case import STEPS, Case
from net.data import held_out, pack_length, training_data
from train_cases import history, make_trainer, quietly


@dataclass
class Ours:
    """Results of a case on one rank.

    Args:
        refusal: What the product says against it before it trains.
    """

    refusal: str | None = None
    logged: dict[str, list[float]] = field(default_factory=dict)


def run_cases(jobs: list[tuple[Case, Path, Path | None, Path]]) -> list[Ours]:
    """Each case from its model's directory and its adapter's; gradients and the trained model go to the last.

    What fails ends all of them: other ranks would wait for one that goes on to the next case.
    """
    return [_run_case(*job) for job in jobs]


def _run_case(case: Case, path: Path, adapter: Path | None, folder: Path) -> Ours:
    callbacks = [FirstGradients(folder / "gradients"), Fault(case.fault)]
    try:
        trainer = make_trainer(
            path,
            folder / "run",
            train_dataset=training_data(case),
            eval_dataset=held_out(case),
            pack_length=pack_length(case),
            adapter=adapter,
            callbacks=callbacks,
            **trainer_settings(case),
        )
    except McaError as error:
        return Ours(refusal=" ".join(str(error).split()))
    for callback in callbacks:
        callback.trainer = trainer
    quietly(trainer.train)
    quietly(trainer.evaluate)
    trainer.model.save_pretrained_as_hf(folder / "after")
    return Ours(logged={key: history(trainer, key) for key in ("loss", "grad_norm", "eval_loss")})


def trainer_settings(case: Case) -> dict[str, Any]:
    """Training arguments of a case."""
    fixed = {"max_steps": STEPS, "train_sampling_strategy": "sequential", "warmup_steps": 0}
    quiet = {"attention_dropout": 0.0, "hidden_dropout": 0.0}  # of families whose files say otherwise
    return {**fixed, **quiet, "learning_rate": 1e-3, **case.options}


class OfTrainer(TrainerCallback):
    """Has a look at the trainer itself."""

    trainer: Any = None


class Fault(OfTrainer):
    """Plants a fault when all is ready."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.name:
            from net.faults import FAULTS

            FAULTS[self.name][0](self.trainer)


class FirstGradients(OfTrainer):
    """Exports the gradients of the first step as if they were weights, before they are clipped; zeros without any."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step:
            return
        model = self.trainer.model
        for chunk in self.trainer.engine.chunks:
            _gather(chunk)
        pairs = model._live() if hasattr(model, "adapter") else model.local_params()
        kept = [(tensor, tensor.detach().clone()) for _, tensor in pairs]
        with torch.no_grad():
            for tensor, _ in kept:
                tensor.copy_(tensor.main_grad if tensor.requires_grad else torch.zeros_like(tensor))
            model.save_pretrained_as_hf(self.folder)
            for tensor, before in kept:
                tensor.copy_(before)


def _gather(chunk: Any) -> None:
    """With a split optimizer each rank has the reduced gradients of its part of every bucket only."""
    if not chunk.ddp_config.use_distributed_optimizer:
        return
    for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            own = bucket.grad_data.chunk(ranks.size())[ranks.rank()].clone()
            torch.distributed.all_gather_into_tensor(bucket.grad_data, own, group=ranks)
