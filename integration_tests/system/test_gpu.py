"""On a CUDA device: the factory's models compute what transformers computes, and give back what they were given.

    MCA_DEVICE=cuda pytest -m gpu                       # tools/gpu_kit runs it where a GPU is lent
    MCA_GPU_REHEARSAL=1 pytest -m gpu -k local          # the same code on the CPU

Nothing here has run on a GPU yet: none was at hand when it was written.
"""

import os

os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # before CUDA starts: no library multiplies fp32 with fewer bits

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from gradients import expected_gradients, export_gradient, worst_errors
from layouts import arguments
from mca_models.checkpoint.hf_directory import HfSource
from reference import Reference, make_reference
from routing import compare

pytestmark = pytest.mark.gpu

CASES = (
    "llama",
    "qwen2-tied",
    "mistral",
    "gpt_oss",
    "gemma2",
    "qwen3_moe",
    "glm4_moe",
    "deepseek_v3",
    "olmo2",
    "qwen3_5_text",
)
LOCAL: dict[str, Any] = {"transformer_impl": "local"}
ENGINE: dict[str, Any] = {"transformer_impl": "transformer_engine"}
KINDS = {"local": LOCAL, "engine": ENGINE, "engine-ours": {**ENGINE, "attention_backend": "local"}}
TOLERANCES = {"local": 1e-4, "engine": 3e-2, "engine-ours": 3e-2}
"""Of Transformer Engine until a GPU has shown less: it asks for products of 10 bits (TF32) of fp32 matrices."""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if "engine" in name and find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine")
    for kernel in ("FLASH", "FUSED", "UNFUSED"):  # Megatron sets them once for a process
        monkeypatch.delenv(f"NVTE_{kernel}_ATTN", raising=False)
    return name


@pytest.fixture(params=CASES)
def reference(request: pytest.FixtureRequest, tmp_path: Path) -> Reference:
    return make_reference(request.param, tmp_path, batch=4)


def test_logits_equal_transformers(kind: str, reference: Reference) -> None:
    from mca_models.megatron import AutoModel

    model = AutoModel.from_pretrained(reference.path, arguments("tp1", **KINDS[kind]))
    assert model.implementation == KINDS[kind]["transformer_impl"]
    assert {tensor.device.type for _, tensor in model.local_params()} == {os.environ["MCA_DEVICE"]}
    compared = compare(model, reference)
    assert compared.difference <= TOLERANCES[kind]
    assert kind != "local" or compared.problem() is None


def test_gradients_equal_autograd(kind: str, reference: Reference, tmp_path: Path) -> None:
    expected = expected_gradients(reference, tmp_path)
    export_gradient(reference, "tp1", tmp_path / "found", **KINDS[kind])
    worst = worst_errors(expected, tmp_path / "found")
    assert worst[0][1] <= TOLERANCES[kind], worst


def test_both_implementations_write_the_same_checkpoints(
    kind: str, reference: Reference, tmp_path: Path
) -> None:
    from mca_models.megatron import AutoModel

    args = arguments("tp1", **KINDS[kind])
    AutoModel.from_pretrained(reference.path, args).save_pretrained(tmp_path / "mca")
    AutoModel.from_pretrained(tmp_path / "mca", args).save_pretrained_as_hf(tmp_path / "hf")
    AutoModel.from_pretrained(reference.path, arguments("tp1", **LOCAL)).save_pretrained(tmp_path / "plain")
    assert tensors(tmp_path / "hf") == tensors(reference.path)
    files = [path.relative_to(tmp_path / "mca") for path in (tmp_path / "mca").rglob("*.safetensors")]
    assert files
    for name in files:
        assert (tmp_path / "mca" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def tensors(path: Path) -> dict[str, bytes]:
    return {info.name: bytes(info.array()) for info in HfSource(path).tensors()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_near(kind: str, dtype: Any, tmp_path: Path) -> None:
    from mca_models.megatron import AutoModel

    reference = make_reference("llama", tmp_path)
    model = AutoModel.from_pretrained(reference.path, arguments("tp1", **KINDS[kind]), dtype=dtype)
    logits = model.logits(reference.input_ids).cpu()
    assert float((logits - reference.logits).std() / reference.logits.std()) < 0.05
    assert torch.isfinite(logits).all()
