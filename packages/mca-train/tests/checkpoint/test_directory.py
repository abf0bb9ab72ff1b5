"""The best checkpoint of a run that goes on with another metric."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mca_train.checkpoint import integrity
from mca_train.checkpoint.directory import reset_best_metric


@pytest.mark.parametrize(
    ("metric", "best", "reset"),
    [
        ("eval_loss", 2.0, False),
        ("eval_accuracy", 2.0, True),
        ("eval_accuracy", None, False),
        (None, 2.0, False),
    ],
)
def test_the_best_metric_is_forgotten_if_another_one_is_followed(
    tmp_path: Path, metric: str | None, best: float | None, reset: bool
) -> None:
    saved = {"metric_for_best_model": "eval_loss", "greater_is_better": False}
    (tmp_path / integrity.ARGUMENTS_FILE).write_text(json.dumps(saved))
    state: Any = SimpleNamespace(best_metric=best, best_model_checkpoint="checkpoint-2", best_global_step=2)
    args: Any = SimpleNamespace(metric_for_best_model=metric, greater_is_better=None)
    assert reset_best_metric(state, tmp_path, args) is reset
    kept = (best, "checkpoint-2", 2)
    found = (state.best_metric, state.best_model_checkpoint, state.best_global_step)
    assert found == ((None, None, None) if reset else kept)
