"""Warnings at the construction of a model: unrequested local layers, results that depend on the layout."""

import os
import sys
from types import SimpleNamespace

import pytest
import transformers

from mca_config.arguments import DistributingParallelArguments
from mca_config.errors import McaError
from mca_models.megatron.auto import AutoModel, local_layers_warning, token_distribution_notice
from mca_models.megatron.factory.transformer_config import choose_implementation
from mca_models.megatron.platform import _device


@pytest.mark.parametrize(
    ("built", "asked", "missing", "reported"),
    [
        ("local", None, "Transformer Engine is not installed", True),
        ("local", "local", "Transformer Engine is not installed", False),
        ("transformer_engine", None, None, False),
        ("local", None, None, False),
    ],
)
def test_local_layers_on_a_gpu_are_told_unless_asked_for(built, asked, missing, reported):
    said = local_layers_warning(built, asked, missing)
    assert (said is not None) == reported
    assert not reported or ("mca-models[te]" in said and said.startswith(missing))


@pytest.mark.parametrize(
    ("kinds", "capacity", "reported"),
    [
        ("sinkhorn", None, "moe_router_load_balancing_type sinkhorn distributes the tokens"),
        (["aux_loss", "sinkhorn"], None, "moe_router_load_balancing_type sinkhorn distributes the tokens"),
        ("aux_loss", 0.7, "moe_expert_capacity_factor distributes the tokens"),
        ("aux_loss", None, None),
        (["none"], None, None),
    ],
)
def test_what_depends_on_how_tokens_are_dealt_is_told(kinds, capacity, reported):
    megatron = SimpleNamespace(moe_router_load_balancing_type=kinds, moe_expert_capacity_factor=capacity)
    said = token_distribution_notice(megatron)
    assert said is None if reported is None else said.startswith(reported) and "\n" not in said


@pytest.fixture
def broken_engine(tmp_path, monkeypatch):
    """A GPU, and a Transformer Engine that was built for another torch."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "pytorch.py").write_text("raise ImportError('undefined symbol: _ZN3c10\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(_device, "device_type", lambda: "cuda")
    _device.engine_problem.cache_clear()
    yield
    _device.engine_problem.cache_clear()
    sys.modules.pop("transformer_engine", None)


def test_an_engine_that_does_not_load_is_none_and_says_why(broken_engine):
    assert choose_implementation(DistributingParallelArguments()) == "local"
    assert (
        _device.engine_problem()
        == "Transformer Engine does not load (ImportError: undefined symbol: _ZN3c10)"
    )
    with pytest.raises(
        McaError, match=r"does not load .*undefined symbol.*; fix that or set transformer_impl to"
    ):
        choose_implementation(DistributingParallelArguments(transformer_impl="transformer_engine"))


def test_megatrons_variable_stands_before_cuda_is_asked(monkeypatch):
    monkeypatch.delenv("MCA_DEVICE", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    asked = []
    monkeypatch.setattr(
        "torch.cuda.is_available", lambda: asked.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
    )
    _device.device_type.__wrapped__()
    assert asked == ["1"]


def test_arguments_of_transformers_are_refused():
    args = transformers.TrainingArguments("unused", use_cpu=True, report_to="none")
    with pytest.raises(
        McaError, match=r"args is transformers.TrainingArguments; use mca_config.TrainingArguments"
    ):
        AutoModel.from_config(SimpleNamespace(), args)
