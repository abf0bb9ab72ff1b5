"""Parts of Hugging Face's Trainer that are replaced: counters of callbacks, and views of the model."""

import json
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback

from mca_config.errors import McaError
from mca_train.trainer.base import (
    ConfigView,
    ModelView,
    NoAccelerator,
    is_early_stopped,
    reset_patience,
    restore_counters,
)


def stopping(patience: int, counter: int = 0) -> EarlyStoppingCallback:
    callback = EarlyStoppingCallback(early_stopping_patience=patience)
    callback.early_stopping_patience_counter = counter
    return callback


@pytest.mark.parametrize(
    ("patience", "counter", "is_stopped"),
    [(3, 2, False), (3, 3, True), (3, 4, True), (1, 0, False), (1, 1, True), (0, 0, False), (0, 1, True)],
)
def test_a_run_has_stopped_early_if_its_patience_was_used_up(
    patience: int, counter: int, is_stopped: bool
) -> None:
    assert is_early_stopped([TrainerCallback(), stopping(9), stopping(patience, counter)]) is is_stopped
    assert is_early_stopped([]) is False


def test_counters_are_those_of_the_checkpoint_and_arguments_those_of_the_run() -> None:
    first, second, third = stopping(3), stopping(4), stopping(5)
    saved: Any = {
        "EarlyStoppingCallback": [
            {"args": {"early_stopping_patience": 9}, "attributes": {"early_stopping_patience_counter": 2}},
            {"attributes": {"early_stopping_patience_counter": 7}},
        ]
    }
    restore_counters([TrainerCallback(), first, second, third], saved)
    counters = [each.early_stopping_patience_counter for each in (first, second, third)]
    assert counters == [2, 7, 0] and first.early_stopping_patience == 3
    restore_counters([third], {"EarlyStoppingCallback": saved["EarlyStoppingCallback"][1], "Other": {}})
    assert third.early_stopping_patience_counter == 7
    restore_counters([third], {"EarlyStoppingCallback": {}})
    assert third.early_stopping_patience_counter == 7
    reset_patience([TrainerCallback(), third])
    assert third.early_stopping_patience_counter == 0


def test_callbacks_see_a_configuration_and_no_weights() -> None:
    view = ModelView({"hidden_size": 8, "a": torch.float32})
    config = view.config
    assert (config.hidden_size, config.absent) == (8, None) and config.to_dict() == {
        "hidden_size": 8,
        "a": torch.float32,
    }
    assert json.loads(config.to_json_string()) == {"hidden_size": 8, "a": "torch.float32"}
    assert config.to_json_string().startswith('{\n  "a"') and config.to_json_string().endswith("}\n")
    assert not hasattr(ConfigView({}), "_absent")
    for name in ("named_parameters", "state_dict"):
        with pytest.raises(McaError, match="a callback reads parameters of its model"):
            getattr(view, name)()
    with pytest.raises(NotImplementedError):
        view(torch.zeros(1), torch.zeros(1))
    assert NoAccelerator().unwrap_model(view) is view and NoAccelerator().free_memory(1, 2) == (1, 2)
