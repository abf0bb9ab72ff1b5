"""Predicted times of layers that differ from one another."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from mca_config import TrainingArguments
from mca_models.templates import config_from_hf
from mca_train.plan.counts import ModelCounts
from mca_train.plan.hardware import hardware_of
from mca_train.plan.memory import Subject
from mca_train.plan.search import predicted

QWEN3_8B = Path(__file__).parents[4] / "tools/recipes/qwen3-8b.json"
WIDE: dict[str, Any] = {"num_attention_heads": 64, "num_query_groups": 16, "kv_channels": 256}


def seconds(folder: Path, **changes: Any) -> float:
    """Of the passes of a step through 4 layers on one rank."""
    args = TrainingArguments(output_dir=str(folder), bf16=True, use_cpu=True, report_to="none")
    config = config_from_hf(json.loads(QWEN3_8B.read_text()) | {"num_hidden_layers": 4})
    config = replace(config, **changes)
    model = ModelCounts.of(config)
    subject = Subject(
        config=config, seq_length=8192, model=model, implementation="transformer_engine", on_gpu=True
    )
    return predicted(subject, args, config.layout, 1, hardware_of("h100-80")).passes


def test_each_layer_takes_the_time_of_its_own_heads(tmp_path: Path) -> None:
    kinds = {"of_kind": {"sliding_attention": WIDE}}

    def of(*names: str) -> float:
        return seconds(tmp_path, layer_types=names, **kinds)

    full, wide = of(*["full_attention"] * 4), of(*["sliding_attention"] * 4)
    assert full == seconds(tmp_path)
    assert wide == seconds(tmp_path, **WIDE) > full
    assert of(*["full_attention", "sliding_attention"] * 2) == (full + wide) / 2


def test_narrow_values_and_keys_that_are_taken_save_time(tmp_path: Path) -> None:
    whole = seconds(tmp_path)
    assert seconds(tmp_path, value_channels=64) < whole
    assert seconds(tmp_path, values_are_keys=True) < whole
    assert seconds(tmp_path, num_kv_shared_layers=2) < whole
    assert seconds(tmp_path, attention_output_gate=True) > whole
