"""Unsupported values of a vision model in ``config.json`` raise an error with the key, for every family."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_vision
import transformers

from mca_config.errors import McaError
from mca_models.templates import config_from_hf, config_to_hf, get_family
from mca_models.templates.parts.vision_values import VisionValues

GEMMA = json.loads((Path(__file__).parents[1] / "data/vision_configs/gemma-3-27b.json").read_text())
WRONG = (None, "x", "1", -1, 0, 1.5, True, [], [14, 14], [1, "x"], {"a": 1}, 10**30, float("inf"))


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("patch_size", 0, "a whole number from 1 to 4194304"),
        ("patch_size", [14, 14], "a whole number from 1 to 4194304"),
        ("hidden_size", None, "a whole number from 1 to 4194304"),
        ("num_hidden_layers", 10**8, "a whole number from 1 to 4096"),
        ("vision_use_head", "no", "true or false"),
    ],
)
def test_a_value_of_no_use_is_named(key: str, value: object, wanted: str) -> None:
    hf = {**GEMMA, "vision_config": {**GEMMA["vision_config"], key: value}}
    with pytest.raises(McaError) as caught:
        config_from_hf(hf)
    assert str(caught.value) == f"'vision_config.{key}' of config.json is {value!r}; expected {wanted}"


READERS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "size": (1, [1, 1 << 22], [0, -1, (1 << 22) + 1, True, 1.0, None, "1", [1]]),
    "layers": (1, [1, 1 << 12], [0, (1 << 12) + 1, True, 1.0, None]),
    "sides": (
        (2, 3),
        [1, [1, 2], (1 << 22, 1)],
        [0, [], [1], [1, 2, 3], [1, 0], [0, 1], (1, (1 << 22) + 1), None],
    ),
    "pairs": (
        [(2, 3)],
        [[(1, 2)], [[1, 2], [3, 4]]],
        [[], [(1, 2), (1, 0)], [(1, 0), (1, 2)], [(1,)], (1, 2), None],
    ),
    "factor": (1.0, [1e-9, 1, 1 << 22], [0, 0.0, -1, (1 << 22) + 1, float("inf"), float("nan"), True, None]),
    "flag": (True, [True, False, None], ["true", 2, [], "no"]),
    "indexes": ((1,), [[], [0], (-1, 5)], [[True], [1, "2"], [1.0], 1, None]),
    "index_or_more": (1, [0, -1, [2], (3, 4)], [[], [1, None], True, 1.0, None]),
}


READ: dict[tuple[str, str], Any] = {
    ("sides", "1"): [1, 1],
    ("flag", "None"): False,
    ("index_or_more", "0"): [0],
    ("index_or_more", "-1"): [-1],
}
"""Returned values that differ from the given ones."""


@pytest.mark.parametrize("reader", READERS)
def test_values_are_read_up_to_their_limits(reader: str) -> None:
    default, right, wrong = READERS[reader]
    absent = getattr(VisionValues({}), reader)("key", default)
    assert absent == getattr(VisionValues({"key": default}), reader)("key", default)
    for value in right:
        found = getattr(VisionValues({"key": value}), reader)("key", default)
        assert json.loads(json.dumps(found)) == json.loads(json.dumps(READ.get((reader, repr(value)), value)))
    for value in wrong:
        with pytest.raises(McaError, match=r"^'vision_config\.key' of config\.json is .*; expected "):
            getattr(VisionValues({"key": value}, "vision_config."), reader)("key", default)


def test_a_choice_is_one_of_its_words() -> None:
    assert VisionValues({}).choice("key", "a", "b") == "a"
    assert VisionValues({"key": "b"}).choice("key", "a", "b") == "b"
    with pytest.raises(McaError, match=r"'key' of config\.json is 'c'; expected 'a' or 'b'"):
        VisionValues({"key": "c"}).choice("key", "a", "b")


def changed(hf: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """``hf`` with each value of the vision model, and of what stands beside it, of another kind or left out."""
    towers = [(key,) for key in ("vision_config", "audio_config") if key in hf]
    for part in ((), *towers):
        inside = hf[part[0]] if part else {key: hf[key] for key in hf if key != "text_config"}
        for key in inside:
            for value in WRONG:
                other = copy.deepcopy(hf)
                (other[part[0]] if part else other)[key] = value
                yield other


@pytest.mark.cases(0, always=["internvl"])
@pytest.mark.parametrize("case", sorted(tiny_vision.CASES))
def test_every_changed_value_gives_a_model_or_one_line(case: str) -> None:
    refused = 0
    for hf in changed(tiny_vision.described(case)):
        try:
            config = config_from_hf(hf)
            get_family(config.model_type).hf_shapes(config)
            config_to_hf(config)
        except McaError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("case", "tower"),
    [("llava", transformers.CLIPVisionConfig()), ("llava-siglip", transformers.SiglipVisionConfig())],
)
def test_an_image_has_the_tokens_of_a_tower_whose_sizes_are_not_named(case: str, tower: Any) -> None:
    hf = tiny_vision.described(case)
    for key in ("image_size", "patch_size"):
        hf["vision_config"].pop(key, None)
    vision = get_family(hf["model_type"]).vision
    assert vision is not None and vision.tokens_per_image is not None
    patches = (tower.image_size // tower.patch_size) ** 2
    assert vision.tokens_per_image(config_from_hf(hf)) == patches  # CLIP's class token is left out by default


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim"])
def test_what_qwen3_vl_leaves_out_of_its_text_is_what_transformers_fills_in(key: str) -> None:
    text = {"num_attention_heads": 64, "head_dim": 64, "num_key_value_heads": 16, "hidden_size": 128}
    hf = transformers.Qwen3VLConfig(text_config=text).to_dict()
    hf["architectures"] = ["Qwen3VLForConditionalGeneration"]
    del hf["text_config"][key]
    expected = transformers.AutoConfig.for_model(**hf).text_config
    found = config_from_hf(hf).attention
    assert (found.num_query_groups, found.kv_channels) == (expected.num_key_value_heads, expected.head_dim)
