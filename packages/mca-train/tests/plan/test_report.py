"""The text of a plan."""

from types import SimpleNamespace
from typing import Any

import pytest

from mca_config.layout import ParallelLayout
from mca_train.plan.memory import Plan, StageNeeds
from mca_train.plan.report import render

GIB = 2**30


def rendered(**of_plan: Any) -> str:
    """Return the text of a plan of one stage."""
    plan = Plan(
        **{
            "layout": ParallelLayout(),
            "world_size": 1,
            "data_parallel_size": 1,
            "implementation": "local",
            "stages": (stage_with(),),
            "total_parameters": 1,
            "trained_parameters": None,
            "global_batch": 1,
            "tokens_per_step": 8,
            "bubble": 0.0,
        }
        | of_plan
    )
    training = SimpleNamespace(
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=1,
        sequence_packing=False,
    )
    settings: Any = SimpleNamespace(training=training, lora=SimpleNamespace(is_enabled=False))
    model: Any = SimpleNamespace(model_type="llama", num_layers=2)
    return render(plan, settings, model)


def stage_with(**needs: int) -> StageNeeds:
    """Return a stage of 9 GiB."""
    return StageNeeds(
        layers="1-2",
        parameters=1,
        weights=GIB,
        gradients=GIB,
        optimizer=GIB,
        activations=4 * GIB,
        temporaries=2 * GIB,
        **needs,
    )


@pytest.mark.parametrize(("evaluation", "named"), [(5, False), (6, False), (7, True)])
def test_evaluation_is_named_where_it_needs_more_than_training(evaluation: int, named: bool) -> None:
    text = rendered(stages=(stage_with(evaluation=evaluation * GIB),))
    assert ("in place of activations and temporaries" in text) == named
    assert ("7.000 GiB in place" in text) == named


@pytest.mark.parametrize(("copies", "named"), [(0, ""), (1, "one copy"), (2, "two copies")])
def test_the_copies_of_weights_in_fp8_are_counted(copies: int, named: str) -> None:
    text = rendered(fp8_copies=copies)
    assert named in text
    assert [each for each in ("one copy", "two copies") if each in text] == [named] * bool(named)


def test_a_reference_adds_to_a_stage() -> None:
    assert stage_with().total == 9 * GIB
    assert stage_with(reference=2 * GIB).total == 11 * GIB
    assert stage_with(beforehand=10 * GIB, reference=GIB).total == 11 * GIB
