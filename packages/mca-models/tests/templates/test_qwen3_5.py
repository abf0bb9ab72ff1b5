"""Qwen 3.5 and 3 Next as published: MTP layers under ``mtp.``."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny_hf

from mca_config.errors import HfConfigError
from mca_models.templates import config_from_hf, get_family
from mca_models.templates.shapes import full_shape
from mca_models.weights import Stage

MTP = ["mtp.fc.weight"]


@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_prediction_layers_beside_the_model(case: str, tmp_path: Path) -> None:
    directory = tiny_hf.save(case, tmp_path)
    config = config_from_hf(tiny_hf.read_config(directory))
    family = get_family(config.model_type)
    assert family.with_checkpoint_names(config, []).mtp_num_layers == 0
    found = replace(family.with_checkpoint_names(config, MTP), extra={})
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
    stacked = family.with_checkpoint_names(config, [*MTP, "model.layers.0.mlp.experts.gate_up_proj"])
    inside = {
        name for param in family.params(stacked) for name in param.hf_names() if name.startswith("mtp.")
    }
    assert inside == names  # MTP layers may hold single experts next to stacked ones
    shapes = {param.mca_name(): full_shape(param, found) for param in params}
    assert shapes["mtp.layers.0.eh_proj.weight"] == (32, 64)
    # the gated attention of a decoder layer: (4 heads * 2 + 2 groups * 2) * 16
    assert shapes["mtp.layers.0.transformer_layer.self_attention.linear_qkv.weight"] == (192, 32)


def test_the_width_of_experts_is_transformers_default_and_not_null(tmp_path: Path) -> None:
    hf = tiny_hf.read_config(tiny_hf.save("qwen3_5_moe_text", tmp_path))
    del hf["moe_intermediate_size"], hf["intermediate_size"]
    config = config_from_hf(hf)
    assert config.moe is not None
    assert (config.moe.moe_ffn_hidden_size, config.mlp.ffn_hidden_size) == (512, 512)
    with pytest.raises(HfConfigError, match="has no 'moe_intermediate_size'; a qwen3_5_moe_text model needs"):
        config_from_hf({**hf, "moe_intermediate_size": None})
