"""Adapted modules of a vision-language model, by the adapted parts."""

import copy
import re
from itertools import chain, combinations

import pytest
import tiny_vision
import torch
import transformers

from mca_models.lora.config import AdapterConfig
from mca_models.lora.peft_names import complete_peft_config, exclude_unadapted
from mca_models.lora.targets import linear_targets, unused_modules
from mca_models.templates import config_from_hf, get_family
from mca_models.templates.parts.vision_language import model_part, model_parts

_OMNI = ("gemma4-e2b", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")


@pytest.mark.parametrize(
    "case",
    [
        *(
            "qwen2_5_vl",
            "qwen3_vl",
            "gemma3",
            "internvl",
            "mistral3",
            "glm4v_moe",
            "qwen2_audio",
            "qwen3_asr",
        ),
        *_OMNI,
    ],
)
def test_the_parts_that_are_not_adapted_are_excluded(case: str) -> None:
    config = config_from_hf(tiny_vision.described(case))
    parts = model_parts(config)
    assert len(parts) == (4 if case in _OMNI else 3) and parts[0] == "language"
    for adapted in chain.from_iterable(combinations(parts, count) for count in range(1, len(parts) + 1)):
        document = {"peft_type": "LORA", "target_modules": "all-linear", "exclude_modules": ["1.mlp.fc1"]}
        exclude_unadapted(document, config, adapted)
        adapter = AdapterConfig.from_dict(document)
        found = [
            target
            for target in linear_targets(config)
            if adapter.targets(target.module, linear=target.linear)
        ]
        bare = {"projector"} if case == "gemma3" else set()  # a weight without a module
        assert {model_part(target.base, config) for target in found} == set(adapted) - bare
        assert not any(target.module.endswith("1.mlp.fc1") for target in found)


@pytest.mark.cases(0, always=["gemma3", "glm4v", "internvl", "kimi_k25-moe", "qwen3_vl"])
@pytest.mark.parametrize("case", sorted(tiny_vision.CASES))
def test_targets_in_the_vision_model_are_its_linears(case: str) -> None:
    described = transformers.AutoConfig.for_model(**copy.deepcopy(tiny_vision.described(case)))
    with torch.device("meta"):
        model = transformers.AutoModelForMultimodalLM.from_config(described)
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    config = config_from_hf(described.to_dict())
    vision = get_family(config.model_type).vision
    assert vision is not None
    theirs = {name for name in linears if vision.text_module not in name and "lm_head" not in name}
    unused = vision.unused(config)
    used = {name for name in theirs if not any(part in f"{name}." for part in unused)}
    if case.startswith(
        ("kimi_k25", "qianfan_ocr")
    ):  # q, k and v are one tensor, on which there are no adapters
        used = {name for name in used if not name.endswith(("q_proj", "k_proj", "v_proj"))}
        document = {"peft_type": "LORA", "target_modules": "all-linear"}
        exclude_unadapted(document, config, model_parts(config))
        adapter = AdapterConfig.from_dict(document)
        assert {name for name in theirs if adapter.targets(name, linear=True)} == used
    assert {target.module for target in linear_targets(config) if target.is_vision} == used


def test_saved_modules_that_the_vision_model_has_too_are_named_in_full() -> None:
    config = config_from_hf(tiny_vision.described("qwen3_vl"))
    document = {"peft_type": "LORA", "target_modules": ["q_proj"], "modules_to_save": ["norm", "lm_head"]}
    complete_peft_config(document, config, ())
    *norms, head = document["modules_to_save"]
    assert head == "lm_head" and "model.language_model.norm" in norms
    assert all(name.startswith("model.language_model.") for name in norms)


@pytest.mark.parametrize(("case", "count"), [("llava", 6), ("qwen2_5_vl", 0)])
def test_linears_on_which_no_feature_depends_are_unused(case: str, count: int) -> None:
    """LLaVA takes its features in front of the last layer."""
    config = config_from_hf(tiny_vision.described(case))
    found = unused_modules(config)
    used = {target.module for target in linear_targets(config) if target.is_vision}
    assert used and not used & found and len(found) == count
    assert {re.sub(r"layers\.1\.", "layers.0.", name) for name in found} <= used
