"""The Transformer Engine spec of every family has the names that its template says, without Transformer Engine.

Megatron's own spec and extension classes are built over a stand-in for the package (``te_stub``), which
has its parameter names and no computation.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_hf import CASES, SIZE

FAMILIES = (
    "llama",
    "mistral",
    "qwen2-tied",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "glm4_moe",
    "deepseek_v3",
    "deepseek_v3-no-q-lora",
    "deepseek_v2",
    "olmoe",
    "gpt_oss",
    "gemma3_text",
    "olmo2",
    "phi3",
    "granite",
    "smollm3",
    "exaone4",
    "qwen3_next",
    "qwen3_5_text",
)


@pytest.fixture(scope="module")
def built() -> dict[str, Any]:
    """Live names and shapes of every case, or a traceback, from one process."""
    configs = {case: hf_config(case) for case in FAMILIES}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("te_stub.py"), json.dumps(configs)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return names


def hf_config(case: str) -> dict[str, Any]:
    model_type, different = CASES[case]
    config: dict[str, Any] = transformers.AutoConfig.for_model(model_type, **{**SIZE, **different}).to_dict()
    return config


@pytest.mark.parametrize("case", FAMILIES)
def test_every_live_tensor_has_a_rule(case: str, built: dict[str, Any]) -> None:
    names = built[case]
    assert isinstance(names, dict), names
    if CASES[case][0] not in ("olmo2", "exaone4"):  # no norm before attention or MLP
        assert any("layer_norm_weight" in name for name in names), "norms are fused into linears"
    if CASES[case][0] in ("mixtral", "qwen3_moe"):
        assert "decoder.layers.0.mlp.experts.linear_fc1.weight3" in names, "experts are grouped"
