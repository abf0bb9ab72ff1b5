"""LoRA on Megatron's linears computes, trains and saves what ``peft`` does on the HF model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness import run_ranks
from layouts import Pair, arguments, by_layout, sample, selected, spread, tiered, world_size
from lora_cases import TRAINED
from lora_training import adapter_of, loaded_logits, tokens, train_megatron
from parity import is_sparse
from reference import make_reference

pytestmark = [pytest.mark.ranks, pytest.mark.one_fork]


# the others by default only in test_lora_gradients.py, which goes through the same code
DENSE_LAYOUTS = sample(
    ("tp1", "tp2", "tp2sp", "pp2", "pp2vpp2", "tp2pp2", "tp2pp2sp", "cp2", "tp2cp2sp"),
    *("tp1", "tp2", "pp2vpp2", "tp2pp2sp", "cp2"),
)
EXPERT_LAYOUTS = sample(
    ("tp1", "ep2", "pp2", "tp2ep2etp1sp", "tp2ep2etp2sp", "pp2ep2", "cp2ep2"),
    *("tp1", "ep2", "pp2", "tp2ep2etp2sp", "pp2ep2"),
)
SPARSE = [case for case, (base, _) in TRAINED.items() if is_sparse(base)]
PAIRS = spread([case for case in TRAINED if case not in SPARSE], DENSE_LAYOUTS) + spread(
    SPARSE, EXPERT_LAYOUTS
)
WIDE = (
    *(("qwen2-tied-qv", "tp2"), ("gemma2", "tp1"), ("olmo3", "tp2")),
    *(("qwen2_moe-bare", "pp2"), ("glm4_moe_lite", "tp1"), ("minimax_m2", "ep2")),
)
TOLERANCE = 1e-4


Logits = dict[str, torch.Tensor]
Found = dict[Pair, tuple[list[Logits | str], Path]]
"""By case and layout: what every rank made of it, or why it failed, and where the adapter was saved."""


@pytest.fixture(scope="module")
def theirs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """By case: the base directory and what peft makes of it."""
    folder = tmp_path_factory.mktemp("lora")
    made = {}
    for case in dict.fromkeys(case for case, _ in selected(request, PAIRS)):
        base, settings = TRAINED[case]
        path = make_reference(base, folder).path
        made[case] = {"base": path, **adapter_of(path, folder / f"{case}-peft", settings)}
    return made


def run_cases(jobs: list[tuple[Path, Path, str, Path]]) -> list[Logits | str]:
    """``run_case`` of each, or why it failed. Runs on every rank."""
    found: list[Logits | str] = []
    for job in jobs:
        try:
            found.append(run_case(*job))
        except Exception as error:  # the same on every rank: go on with the other models
            found.append(f"{type(error).__name__}: {error}")
    return found


def run_case(base: Path, adapter: Path, layout: str, saved: Path) -> Logits:
    """Logits of one adapter on one layout before and after training."""
    from mca_models.megatron import AutoModel
    from mca_models.megatron.peft import load_adapter

    models = load_adapter(AutoModel.from_pretrained(base, arguments(layout)), adapter)
    found = {"before": models.logits(tokens())}
    models.merge_adapter()
    found["merged"] = models.logits(tokens())
    models.unmerge_adapter()
    found["unmerged"] = models.logits(tokens())
    train_megatron(models)
    found["after"] = models.logits(tokens())
    models.save_pretrained(saved / "mca")
    models.save_pretrained_as_hf(saved / "peft")
    plain = models.merge_and_unload()
    found["unloaded"] = plain.logits(tokens())
    again = load_adapter(AutoModel.from_pretrained(base, arguments(layout)), saved / "mca")
    found["loaded"] = again.logits(tokens())
    return found


@pytest.fixture(scope="module")
def ours(
    request: pytest.FixtureRequest,
    theirs: dict[str, dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Found:
    """What the factory makes of every case on every layout."""
    folder = tmp_path_factory.mktemp("trained")
    found: Found = {}
    for layout, cases in by_layout(selected(request, PAIRS)).items():
        jobs = [(theirs[c]["base"], theirs[c]["adapter"], layout, folder / f"{c}-{layout}") for c in cases]
        for of_rank in run_ranks(world_size(layout), run_cases, jobs, timeout=300):
            for case, each in zip(cases, of_rank, strict=True):
                found.setdefault((case, layout), ([], folder / f"{case}-{layout}"))[0].append(each)
    return found


@pytest.mark.cases(0, always=["qwen2_moe-ep2", "mixtral-tp2ep2etp2sp"])
@pytest.mark.parametrize(("case", "layout"), tiered(PAIRS, *WIDE))
def test_training_equals_peft(
    case: str,
    layout: str,
    theirs: dict[str, dict[str, Any]],
    ours: Found,
) -> None:
    right = theirs[case]
    by_rank, saved = ours[case, layout]
    assert float((right["after"] - right["before"]).abs().max()) > 0.05
    for found in by_rank:
        assert not isinstance(found, str), found
        for name in ("before", "merged", "unmerged"):
            assert float((found[name] - right["before"]).abs().max()) <= TOLERANCE, name
        for name in ("after", "unloaded", "loaded"):
            assert float((found[name] - right["after"]).abs().max()) <= 10 * TOLERANCE, name
        assert torch.equal(found["unmerged"], found["before"])
    reloaded = loaded_logits(right["base"], saved / "peft")
    assert float((reloaded - right["after"]).abs().max()) <= 10 * TOLERANCE
    written, reference = (
        load_file(f / "adapter_model.safetensors") for f in (saved / "peft", right["trained"])
    )
    assert written.keys() == reference.keys()
