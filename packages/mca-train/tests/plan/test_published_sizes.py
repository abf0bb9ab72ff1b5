"""Published sizes of every family are planned from what their config.json says."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from mca_config import TrainingArguments
from mca_models.templates import config_from_hf, get_family
from planned_training import make_plan

DATA = Path(__file__).parents[3] / "mca-models/tests/data/published.json"
SIZES: dict[str, Any] = json.loads(DATA.read_text())


# heads by kind of layer, and a parallel block
@pytest.mark.cases(0, always=["gemma-4-31b", "command-r-plus"])
@pytest.mark.parametrize("name", SIZES)
def test_a_stage_holds_the_published_parameters(name: str, tmp_path: Path) -> None:
    config = config_from_hf(SIZES[name]["config"])
    training = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    plan = make_plan(config, training, 2048, 1)
    shapes = get_family(config.model_type).hf_shapes(config)
    assert plan.total_parameters == sum(map(prod, shapes.values()))
    (stage,) = plan.stages
    assert stage.parameters == plan.total_parameters
    assert stage.activations > 0
