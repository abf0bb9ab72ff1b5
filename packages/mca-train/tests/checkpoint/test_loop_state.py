"""What a checkpoint says of the run that wrote it, and which of its sums another run takes up."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_config.errors import UsageError
from mca_train import ClassificationTrainer, DpoTrainer, KtoTrainer, McaTrainer, RewardTrainer, groups
from mca_train.checkpoint.directory import require_kind
from mca_train.checkpoint.loop_state import LoopState, Totals
from mca_train.metrics.metric_accumulator import MetricAccumulator
from mca_train.trainer.logging import LoggingMixin

KINDS = (McaTrainer, DpoTrainer, KtoTrainer, RewardTrainer, ClassificationTrainer)


def written(folder: Path, document: dict[str, Any]) -> Path:
    (folder / "training").mkdir(parents=True)
    (folder / "training" / "carried.json").write_text(json.dumps(document))
    return folder


def test_a_checkpoint_goes_on_with_its_own_kind_of_run(tmp_path: Path) -> None:
    assert len({kind.run_kind for kind in KINDS}) == len(KINDS)
    for writer in KINDS:
        checkpoint = written(tmp_path / writer.__name__, LoopState(run_kind=writer.run_kind).to_dict())
        require_kind(checkpoint, writer.run_kind)
        for other in {*KINDS} - {writer}:
            with pytest.raises(UsageError, match=f"is of a {writer.run_kind} run, this is {other.run_kind};"):
                require_kind(checkpoint, other.run_kind)


def test_a_checkpoint_that_says_nothing_goes_on_with_every_kind(tmp_path: Path) -> None:
    document = LoopState(totals=Totals(updates=3)).to_dict()
    del document["run_kind"]
    require_kind(written(tmp_path / "before", document), "dpo")
    require_kind(tmp_path, "dpo")
    assert LoopState.from_dict(document).totals.updates == 3


def with_signals(names: tuple[str, ...]) -> Any:
    meter: Any = SimpleNamespace(state=lambda: [], restore=lambda state: None, samples_before=0)
    parts = {
        "_meter": meter,
        "_aux_losses": meter,
        "watch": meter,
        "_sources": None,
        "_pending": LoopState().due,
    }
    trainer: Any = SimpleNamespace(
        metrics=MetricAccumulator(names, torch.device("cpu")),
        metric_names=names,
        metric_extremes={},
        run_kind="classify",
        _totals=Totals(),
        **parts,
    )
    trainer._meters = lambda: LoggingMixin._meters(trainer)
    return trainer


def test_sums_are_taken_up_under_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "sum_over_data", lambda rows: rows)
    first = with_signals(("accuracy",))
    first.metrics.add({"accuracy": torch.tensor(3.0)}, 4.0)
    first.metrics.end_step()
    carried = LoggingMixin._loop_state(first)
    same, other, wider = (with_signals(names) for names in (("accuracy",), ("mean",), ("accuracy", "mean")))
    for trainer in (same, other, wider):
        LoggingMixin._restore_loop_state(trainer, carried)
    assert same.metrics.flush() == {"accuracy": 0.75}
    assert other.metrics.flush() == {} == wider.metrics.flush()


def test_sums_of_a_version_that_did_not_name_them_are_taken_up() -> None:
    trainer = with_signals(("accuracy",))
    LoggingMixin._restore_loop_state(trainer, LoopState(meters={"signals": [[3.0, 4.0]]}))
    assert trainer.metrics._steps.before.tolist() == [[3.0, 4.0]]
