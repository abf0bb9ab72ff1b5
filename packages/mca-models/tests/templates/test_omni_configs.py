"""``config.json`` of complete omni checkpoints, whose text part is two levels down."""

import json
from dataclasses import replace
from typing import Any

import pytest
import tiny_omni
import transformers

from mca_config.errors import McaError
from mca_models.templates import config_from_hf, config_to_hf
from mca_models.templates.parts.passthrough import without_passthrough


@pytest.fixture(params=tiny_omni.WHOLE)
def hf(request: pytest.FixtureRequest) -> dict[str, Any]:
    config = transformers.AutoConfig.for_model(**tiny_omni.described(request.param))
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False)) | {"dtype": "float32"}
    return found


def test_it_is_written_as_it_was_read(hf: dict[str, Any]) -> None:
    assert config_to_hf(config_from_hf(hf)) == hf


def test_changes_reach_the_text_part_of_the_thinker_alone(hf: dict[str, Any]) -> None:
    config = config_from_hf(hf)
    changed = config_to_hf(replace(config, vocab_size=80, dtype="bfloat16"))
    assert changed["thinker_config"]["text_config"]["vocab_size"] == 80
    assert changed["dtype"] == "bfloat16"
    assert changed["talker_config"] == hf["talker_config"] | {
        key: "bfloat16" for key in ("dtype",) if key in hf["talker_config"]
    }
    again = config_from_hf(changed)
    assert (again.vocab_size, again.dtype) == (80, "bfloat16")


def test_a_file_made_from_scratch_is_of_the_same_thinker(hf: dict[str, Any]) -> None:
    config = config_from_hf(hf)
    made = config_to_hf(replace(config, hf_config={}))
    assert made["enable_audio_output"] is False
    again, same = config_from_hf(made), {"hf_config": {}, "vision_fields": {}}
    assert again.replace_fields(**same) == config.replace_fields(**same)
    transformers.AutoConfig.for_model(**json.loads(json.dumps(made)))


def test_the_thinker_is_the_one_of_transformers(hf: dict[str, Any]) -> None:
    config = without_passthrough(config_from_hf(hf))
    assert config.model_type == hf["model_type"] + "_thinker"
    direct = config_from_hf({**hf["thinker_config"], "dtype": "float32", "model_type": config.model_type})
    assert direct.replace_fields(hf_config={}) == config.replace_fields(hf_config={})


def test_a_file_without_a_thinker_is_refused(hf: dict[str, Any]) -> None:
    with pytest.raises(McaError, match="'thinker_config' must be an object, not None"):
        config_from_hf({**hf, "thinker_config": None})
