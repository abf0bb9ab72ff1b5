"""Published models at full size: every tensor's name and shape, without a byte of weights."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mca_config.model_config import McaModelConfig
from mca_models.templates import FAMILIES, config_from_hf, get_family

CONFIGS = Path(__file__).parents[1] / "data/configs"
# billions of parameters, MTP layers not counted, as published
PUBLISHED = {
    "llama-3.1-405b": 405.9,
    "qwen3-235b-a22b": 235.1,
    "mixtral-8x22b": 140.6,
    "deepseek-v3": 671.0,
    "glm-4.5": 352.8,
    "gpt-oss-120b": 116.8,
    "qwen3-next-80b-a3b": 79.7,
}


def read(name: str) -> dict[str, Any]:
    hf: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return hf


def without_prediction(config: McaModelConfig) -> McaModelConfig:
    return config.replace_fields(mtp_num_layers=0)


def test_every_config_is_checked() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(PUBLISHED)


@pytest.mark.cases(0, always=["qwen3-235b-a22b", "deepseek-v3"])
@pytest.mark.parametrize("name", list(PUBLISHED))
def test_names_and_shapes_are_those_of_transformers(name: str) -> None:
    hf = read(name)
    hf_config = transformers.AutoConfig.for_model(
        **{key: value for key, value in hf.items() if key != "quantization_config"}
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(hf_config)
    expected = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    config = without_prediction(config_from_hf(hf))
    family = get_family(config.model_type)
    assert family.hf_shapes(family.with_checkpoint_names(config, expected.keys())) == expected


@pytest.mark.cases(0, always=["mixtral-8x22b"])
@pytest.mark.parametrize("name", list(PUBLISHED))
def test_parameters_are_as_many_as_published(name: str) -> None:
    config = without_prediction(config_from_hf(read(name)))
    shapes = get_family(config.model_type).hf_shapes(config)
    assert sum(map(prod, shapes.values())) / 1e9 == pytest.approx(PUBLISHED[name], abs=0.05)


SIZES: dict[str, Any] = json.loads((CONFIGS.parent / "published.json").read_text())


@pytest.mark.cases(12)
@pytest.mark.parametrize("name", list(SIZES))
def test_written_down_sizes_have_as_many_parameters_as_published(name: str) -> None:
    size = SIZES[name]
    config = config_from_hf(size["config"])
    family = get_family(config.model_type)
    if "found" in size:
        config = family.with_checkpoint_names(config, size["found"])
    count = sum(map(prod, family.hf_shapes(config).values()))
    if "parameters" in size:
        assert count == size["parameters"]
    else:
        assert count / 1e9 == pytest.approx(size["billions"], rel=0.002)


def test_every_family_has_a_published_size() -> None:
    files = CONFIGS.parent.glob("*configs/*.json")
    configs = [size["config"] for size in SIZES.values()] + [json.loads(path.read_text()) for path in files]
    parts = [part for config in configs for part in (config, config.get("text_config", {}))]
    alone = {kind for kind, family in FAMILIES.items() if not family.built}  # others contain one of them
    assert not alone - {part.get("model_type") for part in parts}


@pytest.mark.parametrize(("name", "billions"), [("deepseek-v3", 11.5), ("glm-4.5", 3.9)])
def test_prediction_layers_have_one_more_decoder_layer(name: str, billions: float) -> None:
    config = config_from_hf(read(name) | {"num_hidden_layers": 5})  # three of them dense
    assert config.mtp_num_layers == 1
    family = get_family(config.model_type)
    shapes, base = family.hf_shapes(config), family.hf_shapes(without_prediction(config))
    beyond = {name: shape for name, shape in shapes.items() if name not in base}
    last = f"model.layers.{config.num_layers - 1}."
    inside = {
        name.replace(last, f"model.layers.{config.num_layers}.") for name in base if name.startswith(last)
    }
    assert {name.split(".", 3)[3] for name in beyond.keys() - inside} == {
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "shared_head.norm.weight",
    }
    assert inside <= beyond.keys()
    assert sum(map(prod, beyond.values())) / 1e9 == pytest.approx(billions, abs=0.2)
