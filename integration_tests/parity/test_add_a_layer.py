"""The example of docs/contribute.md: a feature that a reader adds is built, and rejected where it is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm

from harness import run_ranks
from layouts import arguments
from mca_config.errors import McaError
from pages import blocks
from reference import hf_model

pytestmark = pytest.mark.ranks

PAGE = Path(__file__).parents[2] / "docs" / "contribute.md"


def example() -> Any:
    """Return the feature that the page defines."""
    (source,) = (text for text in blocks(PAGE, "python") if "SUB_NORM = Feature(" in text)
    defined: dict[str, Any] = {}
    exec(compile(source, str(PAGE), "exec"), defined)
    return defined["SUB_NORM"]


def logits_with_feature(path: Path, input_ids: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Return the logits with the feature on one rank, and the error on two tensor ranks."""
    from mca_models.megatron import AutoModel
    from mca_models.megatron.features import features

    features.FEATURES = (*features.FEATURES, example())
    logits = AutoModel.from_pretrained(path, arguments("tp1")).logits(input_ids)
    layout = arguments("tp2")
    from mca_config.layout import ParallelLayout
    from mca_models.megatron.factory.transformer_config import transformer_config
    from mca_models.templates import config_from_hf

    config = config_from_hf(json.loads((path / "config.json").read_text()))
    with pytest.raises(McaError) as caught:
        transformer_config(config, layout, ParallelLayout(tensor_model_parallel_size=2), "float32")
    return logits, str(caught.value)


def test_the_layer_of_the_page_is_computed_as_in_torch(tmp_path: Path) -> None:
    model = hf_model("llama")
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"attn_sub_norm": True}))
    input_ids = torch.arange(48).view(2, 24)
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda linear, args: rms_norm(args[0], args[0].shape[-1:], eps=1e-6)
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        expected = model(input_ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    ((logits, error),) = run_ranks(1, logits_with_feature, tmp_path, input_ids)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)  # fp32 logits of transformers
    with torch.no_grad():
        without = model(input_ids, use_cache=False).logits
    assert (without - expected).abs().max() > 1e-2
    assert "attn_sub_norm spans all heads" in error
