"""What a new model's weights begin with: where transformers begins with one number, so does `from_seed`."""

import pytest
import torch
import transformers
from tiny_hf import ALL, SIZE

from mca_models.megatron.factory.fill import _drawn
from mca_models.templates import config_from_hf, family_of

OTHERWISE = ("softmax_offset", "dt_bias", "router.bias")
"""Where transformers' own models do not agree on how to begin; either is a start."""


def constant(tensor: torch.Tensor) -> float | None:
    """The number that all of a tensor's elements are, if they are one."""
    first = tensor.flatten()[0]
    return float(first) if bool((tensor == first).all()) else None


@pytest.mark.parametrize(
    "case", ["llama", "gemma4_text-experts", "apertus", "deepseek_v32", "minimax_m3_vl_text", "qwen3_next"]
)
def test_what_begins_with_one_number_does_so_from_a_seed(case: str) -> None:
    model_type, different = ALL[case]
    described = transformers.AutoConfig.for_model(model_type, **{**SIZE, **different})
    weights = transformers.AutoModelForCausalLM.from_config(described).state_dict()
    config, compared = config_from_hf(described.to_dict()), 0
    for param in family_of(config.model_type).params(config):
        theirs = [weights[name] for name in param.hf_names() if name in weights]
        if not theirs or theirs[0].dim() > 1 or param.mca.endswith(OTHERWISE):
            continue
        expected = constant(torch.cat([weight.flatten() for weight in theirs]))
        ours = constant(_drawn(3, param, tuple(theirs[0].shape), config))
        assert (ours is None) == (expected is None), param.mca
        assert ours == pytest.approx(expected, rel=1e-2), (
            param.mca
        )  # transformers' own are rounded to bfloat16
        compared += 1
    assert compared >= 9
