"""Parts of text models that transformers keeps, or computes, in fp32 in a model in bf16."""

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_hf
import tiny_versions
import torch
import transformers

from mca_models.megatron import platform
from mca_models.megatron.features.features import settings
from mca_models.templates import config_from_hf, get_family

ROUNDED = ("router.weight", "self_attention.A_log", "self_attention.dt_bias", "self_attention.conv1d.weight")
"""Parameters that casts round, as all of Megatron's, although transformers keeps those of some families in fp32."""


def model_of(case: str) -> Any:
    """Return transformers' model of ``case`` on the meta device."""
    model_type, different = tiny_hf.ALL[case]
    config = transformers.AutoConfig.for_model(model_type, **{**tiny_hf.SIZE, **different})
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("case", ["glm4_moe", "deepseek_v2"])
def test_routers_in_bf16_have_the_logits_of_transformers(case: str) -> None:
    platform.prepare()
    from megatron.core.transformer.moe.router import TopKRouter

    model = model_of(case)
    router = next(module for name, module in model.named_modules() if name.endswith("mlp.gate"))
    weight = torch.nn.Parameter(torch.randn(router.weight.shape).bfloat16())
    router.weight = torch.nn.Parameter(weight.detach().float())
    router.e_score_correction_bias = torch.zeros(len(weight))
    hidden = torch.randn(3, 1, weight.shape[1], dtype=torch.bfloat16)
    chosen = {"moe_router_dtype": None, **settings(config_from_hf(model.config.to_dict()))}
    here: Any = SimpleNamespace(weight=weight, bias=None, config=SimpleNamespace(**chosen))
    logits = TopKRouter.gating(here, hidden)
    assert logits.dtype == torch.float32
    # fp32 sums in another order; logits in bf16 would differ by 4e-3
    torch.testing.assert_close(logits.flatten(0, 1), router(hidden)[0], rtol=1e-5, atol=1e-5)


def keeps_parts_in_fp32(case: str) -> bool:
    """Return True if a class of the module of the case's model names parts that stay in fp32."""
    config_class = transformers.CONFIG_MAPPING[tiny_hf.ALL[case][0]]
    module = sys.modules[transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config_class].__module__]
    return any(getattr(each, "_keep_in_fp32_modules_strict", None) for each in vars(module).values())


def test_casts_keep_in_fp32_what_transformers_keeps() -> None:
    rounded, kept = list[str](), list[str]()
    for case in filter(keeps_parts_in_fp32, tiny_versions.available(tiny_hf.ALL)):
        model = model_of(case)
        in_fp32 = "|".join(map(re.escape, model._keep_in_fp32_modules_strict or ()))
        config = config_from_hf(model.config.to_dict())
        family = get_family(config.model_type)
        for param in family.params(family.with_checkpoint_names(config, model.state_dict().keys())):
            if in_fp32 and any(re.search(rf"\b({in_fp32})\b", name) for name in param.hf_names()):
                (kept if param.keep_fp32 else rounded).append(f"{case}: {param.mca_name()}")
    assert [name for name in rounded if not name.endswith(ROUNDED)] == []
    assert kept
