"""Every patch is still needed, does its work, and is not made where it should not be."""

import json
import pickle
import queue
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from mca_models.megatron import platform
from mca_models.megatron.platform import checkpoint_queue

pytestmark = pytest.mark.skipif(platform.device_type() == "cuda", reason="the patches of the CPU")

CODES = {
    "after megatron": (
        "import sys, types; sys.modules['megatron.core'] = types.ModuleType('megatron.core')\n"
        "from mca_models.megatron import platform; platform.prepare()"
    ),
    "twice": (
        "import sys; sys.path.insert(0, ENGINE); import transformer_engine  # as PEFT does\n"
        "import torch; compile = torch.compile\n"
        "from mca_models.megatron import platform\n"
        "platform.prepare(); platform.prepare()\n"
        "from importlib.util import find_spec\n"
        "assert find_spec('transformer_engine') is None, 'its kernels need a GPU'\n"
        "assert torch.compile is compile\n"
        "assert torch.zeros(2, device='cuda').device.type == 'cpu'\n"
        "assert torch.ones(1).cuda().pin_memory().type() == 'torch.cuda.FloatTensor'\n"
    ),
    "cpu beside a gpu": (
        "import os, torch\n"
        "os.environ['MCA_DEVICE'] = 'cpu'\n"
        "def used(*_): raise SystemExit('CUDA was asked')\n"
        "torch._C._cuda_init = torch._C._cuda_getDeviceCount = torch.cuda.is_available = used\n"
        "torch.cuda.device_count = used\n"
        "from mca_config.model_config import McaModelConfig\n"
        "from mca_models.megatron import AutoModel\n"
        "sizes = dict(hidden_size=8, ffn_hidden_size=16, num_layers=1, num_attention_heads=2, vocab_size=10,\n"
        "             num_query_groups=2, kv_channels=4, max_position_embeddings=8)\n"
        "model = AutoModel.from_config(McaModelConfig.from_fields(model_type='llama', **sizes))\n"
        "assert model.logits(torch.zeros(1, 4, dtype=torch.int64)).device.type == 'cpu'\n"
        "assert not torch.cuda.is_available() and torch.cuda.device_count() == 0\n"
    ),
    "unknown device": (
        "import os; os.environ['MCA_DEVICE'] = 'tpu'\n"
        "from mca_models.megatron import platform; platform.device_type()"
    ),
}

FORKS = """
import json, os, sys, traceback
import torch  # what takes longest of every start; none of what is run has it otherwise

found = []
for code in json.loads(sys.argv[1]):
    (out, in_), (err, in_err) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(in_, 1), os.dup2(in_err, 2)
        failed = 0
        try:
            exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            failed = 1
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(failed)
    os.close(in_), os.close(in_err)
    with os.fdopen(err) as errors, os.fdopen(out) as output:
        said = {"stderr": errors.read(), "stdout": output.read()}
    found.append(said | {"returncode": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])})
print(json.dumps(found))
"""
"""Runs each code of a list in a fork of a process that has imported torch, and nothing of Megatron."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the output of each of `CODES`, and its exit code."""
    engine = tmp_path_factory.mktemp("engine") / "transformer_engine" / "__init__.py"
    engine.parent.mkdir()
    engine.touch()
    codes = {name: code.replace("ENGINE", repr(str(engine.parents[1]))) for name, code in CODES.items()}
    return dict(zip(codes, forked([*codes.values()]), strict=True))


def forked(codes: list[str]) -> list[dict[str, Any]]:
    """Return the exit code and the output of each code, in a fork."""
    command = [sys.executable, "-c", FORKS, json.dumps(codes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def probe() -> dict[str, tuple[bool, bool]]:
    """Return whether each patch was needed when ``prepare()`` ran, and is needed after it was applied."""
    found = {}
    for patch in platform.PATCHES:
        if not (needed := patch.name in platform._applied):
            patch.apply()
        found[patch.name] = (needed, patch.needed())
    return found


@pytest.fixture(scope="module")
def needed() -> dict[str, tuple[bool, bool]]:
    """Return the result of `probe` in a fork: this process has imported Megatron and called ``prepare()``."""
    platform.prepare()
    with ProcessPoolExecutor(1, get_context("fork")) as processes:
        return processes.submit(probe).result()


@pytest.mark.parametrize("patch", platform.PATCHES, ids=lambda patch: patch.name)
def test_patch_is_needed_where_it_says(patch: platform.Patch, needed: dict[str, tuple[bool, bool]]) -> None:
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
    "mtp-recompute",
    "hybrid-grads",
    "hybrid-split",
    "hybrid-views",
    "hybrid-wait",
    "optimizer-te-version",
    "parameter-groups",
    "mtp-padding-mask",
    "cross-entropy-dtype",
    "recompute-without-te",
)


@pytest.mark.parametrize("name", MENDED)
def test_patch_mends_the_fault(name: str, needed: dict[str, tuple[bool, bool]]) -> None:
    assert needed[name][1] is False


@pytest.mark.qualify
def test_prepare_after_megatron_is_refused(ended: dict[str, dict[str, Any]]) -> None:
    assert "before mca_models.megatron.platform.prepare()" in ended["after megatron"]["stderr"]


@pytest.mark.qualify
def test_prepare_is_quiet_idempotent_and_gives_compile_back(ended: dict[str, dict[str, Any]]) -> None:
    assert ended["twice"] == {"returncode": 0, "stderr": "", "stdout": ""}


@pytest.mark.qualify
def test_the_cpu_of_a_machine_with_a_gpu_leaves_the_gpu_alone(ended: dict[str, dict[str, Any]]) -> None:
    assert ended["cpu beside a gpu"]["returncode"] == 0, ended["cpu beside a gpu"]["stderr"]


@pytest.mark.qualify
def test_an_unknown_device_is_refused(ended: dict[str, dict[str, Any]]) -> None:
    assert "MCA_DEVICE is 'tpu'" in ended["unknown device"]["stderr"]


def test_the_result_of_a_spawned_checkpoint_writer_arrives() -> None:
    ours = checkpoint_queue._ResultFile("spawn")
    theirs = pickle.loads(pickle.dumps(ours))  # as Megatron's persistent worker gets it
    with pytest.raises(queue.Empty):
        ours.get_nowait()
    theirs.put({0: ["written"]})
    assert ours.get_nowait() == {0: ["written"]}
