"""Arguments of Megatron's optimizer."""

from pathlib import Path

import pytest
import torch

from mca_config import TrainingArguments
from mca_train.engine.optimizer import optimizer_settings


@pytest.mark.parametrize(
    ("rates", "kept"),
    [
        ({"decoupled_lr": 1e-3}, False),
        ({"decoupled_lr": 2e-3}, True),
        ({"decoupled_lr": 1e-3, "min_lr": 1e-4, "decoupled_min_lr": 1e-4}, False),
        ({"decoupled_lr": 1e-3, "min_lr": 1e-4, "decoupled_min_lr": 1e-5}, True),
        ({"decoupled_lr": 1e-3, "min_lr": 1e-4}, False),
    ],
)
def test_a_rate_of_the_embedding_that_is_the_others_makes_no_group(
    tmp_path: Path, rates: dict[str, float], kept: bool
) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", learning_rate=1e-3, **rates
    )
    settings = optimizer_settings(args, torch.float32)
    assert settings["lr"] == 1e-3
    assert ("decoupled_lr" in settings) == kept
