"""Base model in the configuration of a new adapter."""

from types import SimpleNamespace
from typing import Any

import pytest
from tiny_hf import SIZE

from mca_models.megatron.peft.create import adapter_config
from mca_models.templates import config_from_hf

CONFIG = config_from_hf({**SIZE, "model_type": "llama", "architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize(
    ("given", "source", "written"),
    [
        (None, "models/a", "models/a"),
        ("models/b", "models/a", "models/b"),
        (None, None, None),
        ("models/b", None, "models/b"),
    ],
)
def test_the_base_model_is_the_one_that_was_loaded_unless_it_is_given(
    given: str | None, source: str | None, written: str | None
) -> None:
    models: Any = SimpleNamespace(config=CONFIG, source=source)
    document = {"r": 2, "base_model_name_or_path": given}
    assert adapter_config(document, models).document["base_model_name_or_path"] == written
