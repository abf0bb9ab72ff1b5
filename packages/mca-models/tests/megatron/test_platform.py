"""Every patch is still needed, does its work, and is not made where it should not be."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from mca_models.megatron import platform

pytestmark = pytest.mark.skipif(platform.device_type() == "cuda", reason="the patches of the CPU")

PROBE = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
from mca_models.megatron import platform
from mca_models.megatron.platform.compile_at_import import without_compile
for patch in platform.BEFORE_IMPORT:
    patch.apply()
with without_compile():
    for name in platform._MODULES:
        importlib.import_module(name)
needed = {}
for patch in platform.PATCHES:
    before = patch.needed()
    patch.apply()
    needed[patch.name] = (before, patch.needed())
print(json.dumps(needed))
"""


@pytest.fixture(scope="module")
def needed() -> dict[str, list[bool]]:
    """Whether each patch was needed before and after it was made, in a fresh process."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[bool]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("patch", platform.PATCHES, ids=lambda patch: patch.name)
def test_patch_is_needed_where_it_says(patch: platform.Patch, needed: dict[str, list[bool]]) -> None:
    serves = version("megatron-core") in SpecifierSet(patch.megatron)
    before, _ = needed[patch.name]
    assert before == serves, (
        f"{patch.name} says it serves megatron-core {patch.megatron}; the fault is "
        f"{'there' if before else 'gone'} in {version('megatron-core')}: change its versions or remove it"
    )


MENDED = (
    "router-gemm-name",
    "split-sizes",
    "distributed-adam",
    "mla-flags",
    "hybrid-grads",
    "hybrid-split",
    "hybrid-views",
    "optimizer-te-version",
    "parameter-groups",
    "cross-entropy-dtype",
    "recompute-without-te",
)


@pytest.mark.parametrize("name", MENDED)
def test_patch_mends_the_fault(name: str, needed: dict[str, list[bool]]) -> None:
    assert needed[name][1] is False


def run(code: str) -> Any:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_prepare_after_megatron_is_refused() -> None:
    code = (
        "import sys, types; sys.modules['megatron.core'] = types.ModuleType('megatron.core')\n"
        "from mca_models.megatron import platform; platform.prepare()"
    )
    assert "before mca_models.megatron.platform.prepare()" in run(code).stderr


def test_prepare_is_quiet_idempotent_and_gives_compile_back(tmp_path: Path) -> None:
    engine = tmp_path / "transformer_engine" / "__init__.py"
    engine.parent.mkdir()
    engine.touch()
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import transformer_engine  # as PEFT does\n"
        "import torch; compile = torch.compile\n"
        "from mca_models.megatron import platform\n"
        "platform.prepare(); platform.prepare()\n"
        "from importlib.util import find_spec\n"
        "assert find_spec('transformer_engine') is None, 'its kernels need a GPU'\n"
        "assert torch.compile is compile\n"
        "assert torch.zeros(2, device='cuda').device.type == 'cpu'\n"
        "assert torch.ones(1).cuda().pin_memory().type() == 'torch.cuda.FloatTensor'\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert not done.stderr and not done.stdout


def test_the_cpu_of_a_machine_with_a_gpu_leaves_the_gpu_alone() -> None:
    code = (
        "import os, torch\n"
        "os.environ['MCA_DEVICE'] = 'cpu'\n"
        "def used(*_): raise SystemExit('CUDA was asked')\n"
        "torch._C._cuda_init = torch._C._cuda_getDeviceCount = torch.cuda.is_available = used\n"
        "torch.cuda.device_count = used\n"
        "from mca_config.model_config import McaModelConfig\n"
        "from mca_models.megatron import AutoModel\n"
        "sizes = dict(hidden_size=8, ffn_hidden_size=16, num_layers=1, num_attention_heads=2, vocab_size=10,\n"
        "             num_query_groups=2, kv_channels=4, max_position_embeddings=8)\n"
        "model = AutoModel.from_config(McaModelConfig(model_type='llama', **sizes))\n"
        "assert model.logits(torch.zeros(1, 4, dtype=torch.int64)).device.type == 'cpu'\n"
        "assert not torch.cuda.is_available() and torch.cuda.device_count() == 0\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_an_unknown_device_is_refused() -> None:
    done = run(
        "import os; os.environ['MCA_DEVICE'] = 'tpu'\n"
        "from mca_models.megatron import platform; platform.device_type()"
    )
    assert "MCA_DEVICE is 'tpu'" in done.stderr
