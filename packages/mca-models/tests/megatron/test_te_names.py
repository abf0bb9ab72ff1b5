"""What Transformer Engine's spec builds for every family has the names and shapes of its template, without the package.

Megatron's own spec and extension classes are built over a stand-in for it (``te_stub``), which has its parameter
names and no computation; ranks are those of process groups that are mocks.
"""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_hf import CASES, SIZE

from mca_models.templates import FAMILIES

TWO = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
SPARSE = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
ENGINE, OURS, CAPPED = "TEDotProductAttention", "CoreAttention", "CappedAttention"


def job(case: str, ranks: int = 1, rank: int = 0, **arguments: Any) -> dict[str, Any]:
    model_type, different = CASES[case]
    config: dict[str, Any] = transformers.AutoConfig.for_model(model_type, **{**SIZE, **different}).to_dict()
    return {"config": config, "arguments": arguments, "ranks": ranks, "rank": rank}


def is_sparse(case: str) -> bool:
    return any(name in CASES[case][1] for name in ("num_experts", "num_local_experts", "n_routed_experts"))


JOBS = {case: job(case) for case in CASES}
JOBS |= {f"{case}-cut": job(case, 2, 1, **TWO, **(SPARSE if is_sparse(case) else {})) for case in CASES}
JOBS |= {
    f"{case}-ours": job(case, attention_backend="local")
    for case in ("mistral", "gpt_oss", "deepseek_v3", "gemma2")
}


@pytest.fixture(scope="module")
def built() -> dict[str, Any]:
    """What stands for every job, or a traceback, from one process."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("te_stub.py"), json.dumps(list(JOBS.values()))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(JOBS, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", JOBS)
def test_every_live_tensor_has_a_rule_and_its_shape(name: str, built: dict[str, Any]) -> None:
    found = built[name]
    assert isinstance(found, dict), found
    assert not {live: shapes for live, shapes in found["shapes"].items() if shapes[0] != shapes[1]}


@pytest.mark.parametrize("case", CASES)
def test_norms_are_fused_and_experts_grouped(case: str, built: dict[str, Any]) -> None:
    names = built[case]["shapes"]
    if FAMILIES[CASES[case][0]].config.constants.get("norm_placement") != "post":
        assert any("layer_norm_weight" in name for name in names)
    assert is_sparse(case) == any(name.endswith("mlp.experts.linear_fc1.weight3") for name in names)


def test_norms_inside_latent_attention_have_their_own_epsilon(built: dict[str, Any]) -> None:
    assert built["deepseek_v3"]["epsilon"] == {
        "linear_q_up_proj": 1e-6,
        "linear_kv_up_proj": 1e-6,
        "linear_fc1": SIZE["rms_norm_eps"],
    }
    assert set(built["llama"]["epsilon"].values()) == {SIZE["rms_norm_eps"]}


def test_the_core_attention_can_be_chosen(built: dict[str, Any]) -> None:
    assert built["mistral"]["attention"] == [ENGINE]
    assert built["mistral-ours"]["attention"] == [OURS]
    assert built["gpt_oss-ours"]["attention"] == [OURS]
    assert built["deepseek_v3-ours"]["attention"] == [OURS]
    assert built["gemma2"]["attention"] == built["gemma2-ours"]["attention"] == [CAPPED]


def test_the_stand_in_has_the_names_that_megatron_reads() -> None:
    package = find_spec("megatron.core")
    assert package and package.submodule_search_locations
    (source,) = Path(package.submodule_search_locations[0]).glob("extensions/transformer_engine.py")
    text = source.read_text()
    named = (
        "fused_layer.layer_norm_weight",
        "fused_layer.layer_norm_bias",
        "linear_layer.weight",
        "'softmax_offset': 0",
    )
    assert not [name for name in named if name not in text]
    assert re.search(r"weight\{gemm_idx\}", text), "a grouped linear's weights are numbered"
