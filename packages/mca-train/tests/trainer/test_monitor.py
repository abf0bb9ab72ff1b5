"""Skipped steps: the loss scale must fall from step to step."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_config.errors import McaError
from mca_train.trainer import monitor
from mca_train.trainer.monitor import Watch


@pytest.mark.parametrize(("falls", "skipped"), [(True, 30), (False, 11)])
def test_a_run_ends_after_steps_that_are_skipped_at_one_loss_scale(
    falls: bool, skipped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "Throughput", lambda *args: None)
    monkeypatch.setattr(monitor, "Stragglers", lambda ranks: None)
    monkeypatch.setattr(monitor, "require_finite_weights", lambda step, parameters: None)
    monkeypatch.setattr(monitor.groups, "sum_over_data", lambda tensor: tensor)
    args, model, ranks = (
        SimpleNamespace(hysteresis=2, loss_scale=1.0),
        SimpleNamespace(trained_parameters=dict),
        object(),
    )
    watch = Watch(args, model, ranks)  # type: ignore[arg-type]
    result: Any = SimpleNamespace(had_targets=True, updated=False)
    loss: Any = SimpleNamespace(loss_sum=torch.tensor(1.0))

    def skip(step: int) -> None:
        optimizer: Any = SimpleNamespace(get_loss_scale=lambda: 2.0 ** (-step if falls else 0))
        watch.after_step(result, loss, optimizer, step)

    for step in range(1, skipped):
        skip(step)
    if falls:
        skip(skipped)
    else:
        with pytest.raises(
            McaError, match=r"step 11: 10 steps in a row were skipped, .* scale, 1, goes no lower"
        ):
            skip(skipped)
