"""Initial weights of a new model: `from_seed` uses a constant where transformers does."""

from collections.abc import Iterator
from threading import Barrier
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import tiny_vision
import torch
import transformers
from tiny_hf import ALL, SIZE

from mca_models.megatron.factory import fill
from mca_models.megatron.factory.fill import _draw_param, _starts
from mca_models.templates import config_from_hf, get_family

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
    for param in get_family(config.model_type).params(config):
        theirs = [weights[name] for name in param.hf_names() if name in weights]
        if not theirs or theirs[0].dim() > 1 or param.mca.endswith(OTHERWISE):
            continue
        expected = constant(torch.cat([weight.flatten() for weight in theirs]))
        ours = constant(_draw_param(3, param, tuple(theirs[0].shape), config, _starts(config)))
        assert (ours is None) == (expected is None), param.mca
        assert ours == pytest.approx(expected, rel=1e-2), (
            param.mca
        )  # transformers' own are rounded to bfloat16
        compared += 1
    assert compared >= 9


def test_linears_that_clip_begin_without_bounds() -> None:
    config = config_from_hf(tiny_vision.described("gemma4-e2b"))
    model = transformers.AutoModelForMultimodalLM.from_config(
        transformers.AutoConfig.for_model(**tiny_vision.described("gemma4-e2b"))
    )
    bounds = {name: x for name, x in model.named_buffers() if name.endswith(("put_min", "put_max"))}
    params = {name: param for param in get_family("gemma4").params(config) for name in param.hf_names()}
    assert len(bounds) > 100
    for name, theirs in bounds.items():
        assert torch.equal(_draw_param(3, params[name], (), config, _starts(config)), theirs), name


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_parameters_are_drawn_at_once_and_are_what_one_thread_draws() -> None:
    model_type, different = ALL["llama"]
    config = config_from_hf(transformers.AutoConfig.for_model(model_type, **{**SIZE, **different}).to_dict())
    params = [param for param in get_family(config.model_type).params(config) if not param.vocab][:24]
    assert len(params) == 24, "an even number: two meet"
    at: Any = SimpleNamespace(tp=0, etp=0)
    meeting = Barrier(2, timeout=60)

    def met(*args: Any) -> torch.Tensor:
        meeting.wait()
        return _draw_param(*args)

    def filled(count: int, draw: Any) -> list[torch.Tensor]:
        torch.set_num_threads(count)
        held: list[Any] = [(SimpleNamespace(param=param), torch.empty(6, 4)) for param in params]
        with patch.object(fill, "_draw_param", draw):
            fill.from_seed(3, held, config, at)
        return [live for _, live in held]

    for alone, together in zip(filled(1, _draw_param), filled(2, met), strict=True):
        assert torch.equal(alone, together)
