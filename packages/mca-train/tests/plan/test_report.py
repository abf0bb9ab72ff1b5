"""The text of a plan."""

from types import SimpleNamespace
from typing import Any

import pytest

from mca_config.layout import ParallelLayout
from mca_train.plan.memory import Plan, StageNeeds
from mca_train.plan.report import render

GIB = 2**30


@pytest.mark.parametrize(("evaluation", "named"), [(5, False), (6, False), (7, True)])
def test_evaluation_is_named_where_it_needs_more_than_training(evaluation: int, named: bool) -> None:
    stage = StageNeeds(
        layers="1-2",
        parameters=1,
        weights=GIB,
        gradients=GIB,
        optimizer=GIB,
        activations=4 * GIB,
        temporaries=2 * GIB,
        evaluation=evaluation * GIB,
    )
    plan = Plan(
        layout=ParallelLayout(),
        world_size=1,
        data_parallel_size=1,
        implementation="local",
        stages=(stage,),
        total_parameters=1,
        trained_parameters=None,
        global_batch=1,
        tokens_per_step=8,
        bubble=0.0,
    )
    training = SimpleNamespace(
        per_device_train_batch_size=1, per_device_eval_batch_size=1, gradient_accumulation_steps=1
    )
    settings: Any = SimpleNamespace(training=training, lora=SimpleNamespace(is_enabled=False))
    text = render(plan, settings, SimpleNamespace(model_type="llama", num_layers=2))  # type: ignore[arg-type]
    assert ("in place of activations and temporaries" in text) == named
    assert ("7.000 GiB in place" in text) == named
