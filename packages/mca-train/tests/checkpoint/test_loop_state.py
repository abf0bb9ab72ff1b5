"""Fields of a checkpoint about the run that wrote it, and the sums that another run continues."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_config.errors import McaError, UsageError
from mca_train import ClassificationTrainer, DpoTrainer, KtoTrainer, McaTrainer, RewardTrainer, groups
from mca_train.checkpoint.directory import load_position, require_kind
from mca_train.checkpoint.training_state import LoopState, Totals
from mca_train.checkpoint.writer import CheckpointWriter
from mca_train.trainer.base import Progress
from mca_train.trainer.logger import Logger

KINDS = (McaTrainer, DpoTrainer, KtoTrainer, RewardTrainer, ClassificationTrainer)


def written(folder: Path, document: dict[str, Any]) -> Path:
    (folder / "training").mkdir(parents=True)
    (folder / "training" / "optimizer.json").write_text("{}")
    (folder / "training" / "loop_state.json").write_text(json.dumps(document))
    return folder


def test_a_checkpoint_goes_on_with_its_own_kind_of_run(tmp_path: Path) -> None:
    assert len({kind.run_kind for kind in KINDS}) == len(KINDS)
    for writer in KINDS:
        checkpoint = written(tmp_path / writer.__name__, LoopState(run_kind=writer.run_kind).to_dict())
        require_kind(checkpoint, writer.run_kind)
        for other in {*KINDS} - {writer}:
            with pytest.raises(UsageError, match=f"is of a {writer.run_kind} run, this is {other.run_kind};"):
                require_kind(checkpoint, other.run_kind)


def test_a_checkpoint_whose_training_cannot_be_read_says_what_to_do(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, LoopState().to_dict())
    with pytest.raises(UsageError, match="is of another program, this is dpo; to use its model"):
        require_kind(checkpoint, "dpo")
    with pytest.raises(
        McaError, match=r"position.json: is missing, so training cannot resume; to use its model"
    ):
        load_position(checkpoint)
    (checkpoint / "training" / "position.json").write_text("{")
    with pytest.raises(
        McaError, match=r"position.json: cannot be read \(Expecting property name.*as model_name"
    ):
        load_position(checkpoint)


def with_metrics(names: tuple[str, ...]) -> Logger:
    plain = SimpleNamespace(num_moe_experts=None, mtp_num_layers=None)
    hf: Any = SimpleNamespace(
        ranks=SimpleNamespace(device=torch.device("cpu"), context_parallel_rank=0),
        train_dataset=None,
        metric_names=names,
        metric_differences={},
        metric_extremes={},
        token_values=None,
        run_kind="classify",
        watch=SimpleNamespace(state=lambda: {"skipped": 0}, restore=lambda state: None),
        model=SimpleNamespace(chunks=[SimpleNamespace(config=plain)]),
    )
    checkpoints = CheckpointWriter(in_background=False)
    return Logger(hf, checkpoints, Progress())


def test_sums_are_taken_up_under_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "sum_over_data", lambda rows: rows)
    first = with_metrics(("accuracy",))
    first.metrics.add({"accuracy": torch.tensor(3.0)}, 4.0)
    first.metrics.end_step()
    carried = first.loop_state()
    same, other, wider = (with_metrics(names) for names in (("accuracy",), ("mean",), ("accuracy", "mean")))
    for found in (same, other, wider):
        found.restore(carried)
    assert same.metrics.flush() == {"accuracy": 0.75}
    assert other.metrics.flush() == {} == wider.metrics.flush()


@pytest.mark.parametrize(("loss", "steps", "mean"), [(3.0, 1, 3.0), (3.0, 2, 1.5), (0.0, 0, 0.0)])
def test_the_mean_loss_is_over_all_steps(loss: float, steps: int, mean: float) -> None:
    assert Totals(loss=loss, steps=steps).mean_loss == mean
