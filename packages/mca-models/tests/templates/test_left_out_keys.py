"""A key that ``config.json`` leaves out has the value that transformers fills in, in every family."""

import copy
import re
from typing import Any

import pytest
import tiny_vision
import transformers

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_models.templates import FAMILIES, config_from_hf, get_family

PARTS = ("text_config", "vision_config", "audio_config")
TEXT = [kind for kind, family in FAMILIES.items() if family.vision is None]
NEEDED = re.compile(
    r"has no '(?:\w+\.)?(\w+)'|'(?:\w+\.)?(\w+)' of config.json is None|made of its values \('(\w+)'"
)
GIVEN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"norm_topk_prob": True, "num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
}
"""Values where mca does not support transformers' default model of a family."""


def filled_in(hf: dict[str, Any]) -> dict[str, Any]:
    """Return ``config.json`` as transformers writes it after it has read ``hf``."""
    return transformers.AutoConfig.for_model(**copy.deepcopy(hf)).to_dict()


def read_with_needed_keys(hf: dict[str, Any], full: dict[str, Any]) -> McaModelConfig:
    """Read ``hf``, with the keys of ``full`` that mca does not read a model without added to it."""
    while True:
        try:
            return config_from_hf(copy.deepcopy(hf))
        except McaError as error:
            found = NEEDED.search(str(error))
            if found is None:
                raise
            key = found[1] or found[2] or found[3]
            for inside, outside in [(hf, full), *((hf[part], full[part]) for part in PARTS if part in hf)]:
                if key in outside and key not in inside:
                    inside[key] = outside[key]
                    break
            else:
                raise


@pytest.mark.parametrize("kind", TEXT)
def test_keys_that_a_text_model_leaves_out_are_those_of_transformers(kind: str) -> None:
    given = {"model_type": kind, **GIVEN.get(kind, {})}
    full = filled_in(given)
    found, expected = read_with_needed_keys(given, full), config_from_hf(full)
    assert found.to_fields() | {"hf_config": None} == expected.to_fields() | {"hf_config": None}


@pytest.mark.parametrize("case", sorted(tiny_vision.CASES))
def test_keys_that_towers_leave_out_are_those_of_transformers(case: str) -> None:
    hf = tiny_vision.described(case)
    for part in PARTS[1:]:
        if isinstance(hf.get(part), dict):
            hf[part] = {key: hf[part][key] for key in ("model_type",) if key in hf[part]}
    full = filled_in(hf)
    family = get_family(hf["model_type"])
    found, expected = read_with_needed_keys(hf, full), config_from_hf(full)
    assert family.hf_shapes(found) == family.hf_shapes(expected)
    assert family.vision is not None
    if family.vision.tokens_per_image is not None:
        assert family.vision.tokens_per_image(found) == family.vision.tokens_per_image(expected)


@pytest.mark.parametrize(
    "case", ["gemma3", "glmasr", "llava", "llava_next", "qwen2_audio", "vipllava", "voxtral"]
)
def test_text_parts_may_leave_out_every_key(case: str) -> None:
    """Read files of models whose publishers left keys of the text part out."""
    hf = tiny_vision.described(case)
    hf["text_config"] = {key: value for key, value in hf["text_config"].items() if key == "model_type"}
    full = filled_in(hf)
    found, expected = config_from_hf(copy.deepcopy(hf)).to_fields(), config_from_hf(full).to_fields()
    tower = {"hf_config": None, "vision_fields": None}
    assert found | tower == expected | tower


@pytest.mark.parametrize("case", ["glm4v", "glm46v", "glm_ocr"])
def test_other_names_of_keys_win_in_glm_towers(case: str) -> None:
    hf = tiny_vision.described(case)
    own = {"depth": 4, "num_heads": 4, "num_hidden_layers": 3, "num_attention_heads": 2}
    hf["vision_config"] = {**hf["vision_config"], **own}
    found, expected = config_from_hf(copy.deepcopy(hf)), config_from_hf(filled_in(hf))
    family = get_family(hf["model_type"])
    assert family.hf_shapes(found) == family.hf_shapes(expected)
    assert any("blocks.2." in name for name in family.hf_shapes(found))
    assert not any("blocks.3." in name for name in family.hf_shapes(found))


def test_a_window_of_zero_is_global_attention() -> None:
    hf = tiny_vision.described("got_ocr2")
    hf["vision_config"]["window_size"] = 0
    config, family = config_from_hf(copy.deepcopy(hf)), get_family("got_ocr2")
    sides = {shape for name, shape in family.hf_shapes(config).items() if name.endswith("attn.rel_pos_h")}
    assert sides == {(2 * 8 - 1, 8)}  # images of 16 pixels and patches of 2; heads of 8
    assert family.config.to_hf(config, family.architecture) == hf


def test_a_window_of_false_is_not_one_of_zero() -> None:
    hf = tiny_vision.described("got_ocr2")
    hf["vision_config"]["window_size"] = False
    with pytest.raises(
        McaError, match=r"'vision_config\.window_size' of config\.json is False; expected a whole"
    ):
        get_family("got_ocr2").hf_shapes(config_from_hf(hf))


FOLLOWS_HEADS = set("axk1 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_k2 mistral4 youtu".split())
"""Families of MLA, which has no groups: mca gives a file without groups the heads, transformers a number."""


@pytest.mark.parametrize("kind", [kind for kind in TEXT if kind not in FOLLOWS_HEADS])
def test_groups_that_a_text_model_leaves_out_do_not_follow_its_heads(kind: str) -> None:
    """Ask for more heads than transformers' default model has, whose heads and groups may be equal by chance."""
    given = {"model_type": kind, **GIVEN.get(kind, {})}
    full = filled_in(given)
    heads = full.get("num_attention_heads")
    if not isinstance(heads, int) or "num_key_value_heads" not in full:
        pytest.skip("the family has no such keys")
    given |= {"num_attention_heads": 2 * heads, "hidden_size": 2 * full["hidden_size"]}
    full = filled_in(given)
    found, expected = read_with_needed_keys(given, full), config_from_hf(full)
    assert found.to_fields().get("num_query_groups") == expected.to_fields().get("num_query_groups")
