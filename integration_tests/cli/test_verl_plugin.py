"""mca as a plugin of verl: its registration, its methods and the adapter's configuration; no run is trained.

.venv-verl/bin/python -m pytest -n 0 integration_tests/cli/test_verl_plugin.py
"""

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mca_config.errors import McaError

pytestmark = [
    pytest.mark.one_fork,
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl (.ci/verl.txt)"),
]

INHERITED = ["infer_batch", "train_batch"]
"""Methods that verl writes in terms of the others."""


def test_the_engine_has_every_method_of_verls_base_class(tmp_path):
    program = """
from verl.workers.engine.base import BaseEngine
from mca_train.clients.verl.engine import McaEngine
names = (name for name, value in vars(BaseEngine).items() if callable(value) or isinstance(value, property))
print(*sorted(n for n in names if n[0] != "_" and getattr(McaEngine, n) is getattr(BaseEngine, n)), sep=chr(10))
"""
    environment = os.environ | {"MCA_DEVICE": "cpu", "VERL_USE_EXTERNAL_PLUGINS": "mca"}
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-2:] == INHERITED
    assert not {"to", "save_checkpoint", "prime_delta_snapshots"} & set(done.stdout.split())


def test_a_plugin_that_cannot_be_imported_says_so(tmp_path):
    """verl itself logs such a plugin at level debug only."""
    program = "import sys; sys.modules['mca_train.clients.verl.engine'] = None; import verl"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (
        "verl cannot use the engine mca: ModuleNotFoundError: import of mca_train.clients.verl.engine"
        in done.stderr
    )
    assert "VERL_USE_EXTERNAL_PLUGINS=none" in done.stderr


def test_the_configuration_for_the_rollout_has_one_rank_and_scale():
    """Engines scale by alpha / rank; SGLang does not read use_rslora."""
    from mca_train.clients.verl.adapters import rollout_config

    def sent(*factors: tuple[int, float]) -> Any:
        document = {
            "r": 1,
            "lora_alpha": 1,
            "use_rslora": True,
            "target_modules": ["q_proj"],
            "lora_dropout": 0.0,
        }
        rules = SimpleNamespace(factors=[SimpleNamespace(rank=rank, scale=scale) for rank, scale in factors])
        return rollout_config(SimpleNamespace(rules=rules, peft_config=lambda *, per_expert: dict(document)))

    found = sent((16, 2.0), (16, 2.0))  # rsLoRA: 8 / sqrt(16)
    assert (found["r"], found["lora_alpha"]) == (16, 32)
    assert "use_rslora" not in found
    with pytest.raises(McaError, match=r"\[\(8, 2.0\), \(16, 2.0\)\].*set model\.lora\.merge to true"):
        sent((16, 2.0), (8, 2.0))
