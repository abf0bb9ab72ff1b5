"""Qwen 3.5 and 3 Next as published: a vision model beside the text model, prediction layers under ``mtp.``."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_hf
import torch
import transformers
from safetensors.torch import load_file

from mca_models.templates import config_from_hf, config_to_hf, family_of
from mca_models.templates.shapes import whole_shape
from mca_models.weights import Stage

VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
MTP = ["mtp.fc.weight"]


@pytest.fixture(params=["qwen3_5", "qwen3_5_moe"])
def with_vision(request: Any, tmp_path: Path) -> Path:
    _, different = tiny_hf.CASES[f"{request.param}_text"]
    text = {**tiny_hf.SIZE, **different}
    config = transformers.AutoConfig.for_model(
        request.param, text_config=text, vision_config=VISION, tie_word_embeddings=False
    )
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    return tmp_path


def test_the_text_part_is_found_and_the_vision_model_left_with_a_word(with_vision: Path, caplog: Any) -> None:
    tensors = load_file(with_vision / "model.safetensors")
    config = config_from_hf(tiny_hf.read_config(with_vision))
    assert config.model_type in ("qwen3_5_text", "qwen3_5_moe_text")
    family = family_of(config.model_type)
    with caplog.at_level(logging.WARNING):
        found = family.as_found(config, tensors.keys())
    assert "vision model are left behind" in caplog.text
    shapes = family.hf_shapes(found)
    assert shapes == {name: tuple(tensors[name].shape) for name in shapes}
    assert tensors.keys() - shapes.keys() == family.ignored_hf(found)
    assert all(name.startswith("model.visual.") for name in family.ignored_hf(found))


def test_the_text_part_is_a_model_of_its_own_for_transformers(with_vision: Path, tmp_path: Path) -> None:
    config = config_from_hf(tiny_hf.read_config(with_vision))
    hf = config_to_hf(config)
    assert hf["model_type"] == config.model_type
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**hf))
    family = family_of(config.model_type)
    expected = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    assert family.hf_shapes(family.as_found(config, expected.keys())) == expected


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("inner", [None, False, True])
@pytest.mark.parametrize("outer", [None, False, True])
def test_whether_the_head_is_tied_is_said_beside_the_text_part(
    kind: str, inner: bool | None, outer: bool | None
) -> None:
    """As transformers has it, whatever the text part says."""
    text = {**tiny_hf.SIZE, **tiny_hf.CASES[f"{kind}_text"][1], **said(inner)}
    config = transformers.AutoConfig.for_model(kind, text_config=text, vision_config=VISION, **said(outer))
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    model.tie_weights()
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    described = {"model_type": kind, "text_config": text, "vision_config": VISION, **said(outer)}
    for hf in (described, config.to_dict()):
        read = config_from_hf(hf)
        assert read.tie_word_embeddings is tied
        assert config_to_hf(read)["tie_word_embeddings"] is tied


def said(tied: bool | None) -> dict[str, bool]:
    return {} if tied is None else {"tie_word_embeddings": tied}


@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_prediction_layers_beside_the_model(case: str, tmp_path: Path) -> None:
    directory = tiny_hf.save(case, tmp_path)
    config = config_from_hf(tiny_hf.read_config(directory))
    family = family_of(config.model_type)
    assert family.as_found(config, []).mtp_num_layers == 0
    found = replace(family.as_found(config, MTP), extra={})
    params = [param for param in family.params(found) if param.stage is Stage.MTP]
    names = {name for param in params for name in param.hf_names()}
    assert {
        "mtp.fc.weight",
        "mtp.norm.weight",
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.layers.0.input_layernorm.weight",
        "mtp.layers.0.self_attn.q_proj.weight",
    } <= names
    assert all(name.startswith("mtp.") for name in names)
    stacked = family.as_found(config, [*MTP, "model.layers.0.mlp.experts.gate_up_proj"])
    inside = {
        name for param in family.params(stacked) for name in param.hf_names() if name.startswith("mtp.")
    }
    assert inside == names  # prediction layers may hold experts one by one beside stacked ones
    shapes = {param.mca_name(): whole_shape(param, found) for param in params}
    assert shapes["mtp.layers.0.eh_proj.weight"] == (32, 64)
    # the gated attention of a decoder layer: (4 heads * 2 + 2 groups * 2) * 16
    assert shapes["mtp.layers.0.transformer_layer.self_attention.linear_qkv.weight"] == (192, 32)
