"""Tensors written in fp8 blocks: those that transformers reads from such files, and no others."""

import json
from dataclasses import replace
from typing import Any

import pytest
import tiny_hf
import tiny_vision
import torch
import transformers
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_models.checkpoint.hf_writer import HfLayout
from mca_models.quantization.hf_tensors import is_linear
from mca_models.templates import FAMILIES, config_from_hf
from mca_models.templates.parts.vision_tower import SPELLING
from mca_models.templates.shapes import full_shape
from mca_models.weights import Stage

UNREAD = sorted(case for case, (kind, _) in tiny_hf.ALL.items() if FAMILIES[kind].fp8_unsupported)
NAMED = ("deepseek_v32", "gpt_bigcode", "jamba", "nemotron_h", "opt", "qwen2_moe")
"""Cases with matrices that are not linears: indexers, position tables, convolutions, gates, rates of a scan."""


def described(case: str) -> tuple[Any, McaModelConfig]:
    kind, different = tiny_hf.ALL[case]
    config = transformers.AutoConfig.for_model(kind, **{**tiny_hf.SIZE, **different})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model, FAMILIES[kind].with_checkpoint_names(config_from_hf(config.to_dict()), [])


def skipped(model: Any, config: McaModelConfig) -> list[str]:
    """The modules that config.json says have no blocks, under the names of modules."""
    params = FAMILIES[config.model_type].params(config)
    wholes = {param.mca_name(): full_shape(param, config) for param in params}
    layout = HfLayout(params, config, dict.fromkeys(wholes, "BF16"), wholes, fp8=True)
    names = json.loads(layout.config_text)["quantization_config"]["modules_to_not_convert"]
    for rule in get_model_conversion_mapping(model):
        names = [rule.rename_source_key(f"{name}.")[0].removesuffix(".") for name in names]
    return list(names)


def read_as_blocks(model: Any, config: McaModelConfig) -> set[str]:
    """The modules that transformers' quantiser replaces by its own on a GPU."""
    left = HfQuantizer.get_modules_to_not_convert(model, skipped(model, config), model._keep_in_fp32_modules)
    replaced = (
        name
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or name.endswith(".experts")) and should_convert_module(name, left)
    )
    tied = {"lm_head"} if config.head.tie_word_embeddings else set()  # which are read without blocks too
    return set(replaced) - tied


def written_as_blocks(config: McaModelConfig) -> set[str]:
    family, found = FAMILIES[config.model_type], set()
    config = family.with_module_names(config)
    config = replace(config, extra={**config.extra, "fused_experts": True})
    for param in family.params(config):
        if param.stage is not Stage.MTP and is_linear(param, full_shape(param, config)):
            ends = ".weight" if param.expert is None else f".{param.hf_names()[0].rpartition('.')[2]}"
            found |= {name.removesuffix(ends) for name in param.hf_names()}
    return found


@pytest.mark.cases(0, always=NAMED)
@pytest.mark.parametrize("case", sorted(tiny_hf.ALL.keys() - set(UNREAD)))
def test_blocks_are_written_where_they_are_read(case: str) -> None:
    model, config = described(case)
    assert written_as_blocks(config) == read_as_blocks(model, config)


@pytest.mark.parametrize("end", ["ForSequenceClassification", "ForTokenClassification"])
def test_a_head_for_scores_stays_as_it_is(end: str) -> None:
    config = config_from_hf({**tiny_hf.SIZE, "model_type": "llama", "architectures": [f"Llama{end}"]})
    params = FAMILIES["llama"].params(config)
    wholes = {param.mca_name(): full_shape(param, config) for param in params}
    layout = HfLayout(params, config, dict.fromkeys(wholes, "BF16"), wholes, fp8=True)
    said = json.loads(layout.config_text)["quantization_config"]
    assert said["modules_to_not_convert"] == ["score"] and layout.tensors["score.weight"][0] == "BF16"
    assert "score.weight" not in layout.scales and len(layout.scales) == 7 * config.num_layers


@pytest.mark.qualify
@pytest.mark.parametrize("case", sorted(tiny_vision.CASES.keys() - {"llama4-moe"}))
def test_blocks_next_to_a_vision_model_are_written_where_they_are_read(case: str) -> None:
    described = transformers.AutoConfig.for_model(**tiny_vision.described(case))
    with torch.device("meta"):
        model = transformers.AutoModelForMultimodalLM.from_config(described)
    config = config_from_hf(described.to_dict())
    for which in range(len(FAMILIES[config.model_type].vision.spellings)):
        spelled = replace(config, extra={**config.extra, SPELLING: which})
        assert written_as_blocks(spelled) == read_as_blocks(model, spelled)


@pytest.mark.parametrize("case", UNREAD)
def test_a_family_whose_blocks_are_not_read_is_refused(case: str) -> None:
    kind, different = tiny_hf.ALL[case]
    config = config_from_hf(
        transformers.AutoConfig.for_model(kind, **{**tiny_hf.SIZE, **different}).to_dict()
    )
    with pytest.raises(McaError, match=f"fp8: transformers reads no fp8 blocks of {kind} models"):
        HfLayout([], config, {}, {}, fp8=True)
