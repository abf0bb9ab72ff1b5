"""Ranks that share samples must be given the same ones, and agree on what an evaluation found."""

from pathlib import Path
from typing import Any

import pytest
import torch

from harness import run_ranks
from train_cases import make_trainer, quietly

pytestmark = pytest.mark.ranks

RUN = {
    "tensor_model_parallel_size": 2,
    "max_steps": 3,
    "logging_steps": 5,
    "train_sampling_strategy": "sequential",
    "gradient_accumulation_steps": 2,
}


def rows(count: int, first: int, others: int = 0) -> list[dict[str, Any]]:
    """Return rows of equal length; from row ``first`` on, ``others`` is added to each token."""
    return [{"input_ids": [1 + row + others * (row >= first)] * 8} for row in range(count)]


def reported(call: Any) -> str:
    from mca_config.errors import McaError

    try:
        quietly(call)
    except McaError as error:
        return str(error)
    return "no error"


def given(checkpoint: Path, output: Path) -> dict[str, Any]:
    """Return the errors of runs of 3 steps of 2 samples with other samples on rank 1, and the losses of evaluations."""
    from mca_train import McaTrainer

    class OfRanks(McaTrainer):
        metric_names = ("rank",)

        def compute_loss(self, output: torch.Tensor, batch: Any, **_: Any) -> Any:
            self.metrics.add({"rank": torch.tensor(float(self.ranks.rank))}, torch.ones(()))
            return super().compute_loss(output, batch)

    rank = torch.distributed.get_rank()
    trainer = make_trainer(checkpoint, output, kind=OfRanks, train_dataset=rows(4, 0), **RUN)

    def trained(data: Any) -> str:
        trainer.train_dataset = data
        return reported(trainer.train)

    found: dict[str, Any] = {
        "first": trained(rows(4, 0, rank)),
        "later": trained(rows(6, 4, rank)),
        "more": trained(rows(4 + rank, 0)),
        "same": trained(rows(4, 0)),
        "evaluated": reported(lambda: trainer.evaluate(rows(2, 0, rank))),
        "evaluated later": reported(lambda: trainer.evaluate(rows(4, 3, rank))),
    }
    trainer.args.data_seed, trainer.args.train_sampling_strategy = 1 + rank, "random"
    found["seed"] = trained(rows(4, 0))
    return found | {"metrics": quietly(trainer.evaluate), "log": trainer.state.log_history[-1]}


def test_ranks_are_given_the_same_samples_and_find_the_same(checkpoint, tmp_path):
    one, other = run_ranks(2, given, checkpoint, tmp_path)
    assert one == other
    for name, when in {
        "first": "step 1",
        "later": "steps 2 to 3",
        "evaluated": "evaluation",
        "evaluated later": "evaluation",
    }.items():
        assert one[name].startswith(f"{when}: ranks 0 and 1, of one replica, have different samples; "), name
    assert one["more"].startswith("step 1: rank 0 has 4 samples, rank 1 has 5; ")
    assert one["seed"].startswith("step 1: rank 0 has 1 data_seed, rank 1 has 2; ")
    assert one["same"] == "no error"
    assert one["metrics"]["eval_rank"] == one["log"]["eval_rank"] == 0
