"""Faults that the parity tests must notice: each planted one is seen."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness import RanksFailed, run_ranks
from layouts import arguments
from mca_models.weights import Concat, Param, Transposed
from reference import Reference, make_reference
from routing import compare

pytestmark = pytest.mark.ranks

Fault = Callable[[Param], Param]


def swapped_k_and_v(param: Param) -> Param:
    if not param.mca.endswith("linear_qkv.weight"):
        return param
    q, k, v = param.hf
    return replace(param, hf=(q, v, k))


def heads_one_after_the_other(param: Param) -> Param:
    return replace(param, layout=Concat((2, 1, 1))) if param.mca.endswith("linear_qkv.weight") else param


def swapped_gate_and_up(param: Param) -> Param:
    return replace(param, hf=param.hf[::-1]) if param.mca.endswith("mlp.linear_fc1.weight") else param


def transposed_row_parallel(param: Param) -> Param:
    return replace(param, layout=Transposed()) if param.mca.endswith("linear_proj.weight") else param


def shifted_layer(param: Param) -> Param:
    if param.layer is None or not param.mca.endswith("layer_norm_weight"):
        return param
    return replace(param, hf_layer=param.layer ^ 1)


FAULTS: tuple[Fault, ...] = (
    swapped_k_and_v,
    heads_one_after_the_other,
    swapped_gate_and_up,
    transposed_row_parallel,
    shifted_layer,
)


def plant(fault: Fault, kind: str) -> None:
    """Has this process's template of family ``kind`` make the mistake."""
    from mca_models import templates

    family = templates.FAMILIES[kind]

    def params(config: Any) -> list[Param]:
        return [fault(param) for param in family.params(config)]

    templates.FAMILIES[kind] = replace(family, params=params)


def difference(reference: Reference, fault: Fault | None) -> float:
    from mca_models.megatron import AutoModel

    if fault is not None:
        plant(fault, "llama")
    model = AutoModel.from_pretrained(reference.path, arguments("tp2"))
    return float((model.logits(reference.input_ids) - reference.logits).abs().max())


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    # heads x head_dim = hidden, so that a transposed projection keeps its shape
    from reference import CASES

    CASES["llama-square"] = ("llama", {"head_dim": 8})
    return make_reference("llama-square", tmp_path_factory.mktemp("faults"))


@pytest.mark.cases(0)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_wrong_template_is_seen(fault: Fault, reference: Reference) -> None:
    assert min(run_ranks(2, difference, reference, fault)) > 1e-2


def test_the_right_template_is_not(reference: Reference) -> None:
    assert max(run_ranks(2, difference, reference, None)) <= 1e-4


def swapped_experts(reference: Reference) -> tuple[float, str | None]:
    """Experts 0 and 1 change places and their router rows too: logits cannot tell. Runs on every rank."""
    from mca_models.megatron import AutoModel

    model = AutoModel.from_pretrained(reference.path, arguments("tp1"))
    mlp: Any = model.chunks[0].decoder.layers[2].mlp
    with torch.no_grad():
        mlp.router.weight[:2] = mlp.router.weight[:2].flip(0)
        first, second = mlp.experts.local_experts[0], mlp.experts.local_experts[1]
        for a, b in zip(first.parameters(), second.parameters(), strict=True):
            kept = a.clone()
            a.copy_(b)
            b.copy_(kept)
    compared = compare(model, reference)
    return compared.difference, compared.problem()


def test_other_experts_are_seen_where_logits_cannot_tell(tmp_path: Path) -> None:
    ((difference, problem),) = run_ranks(1, swapped_experts, make_reference("qwen3_moe", tmp_path))
    assert difference <= 1e-4
    assert problem and problem.endswith("are sent to other experts, in layers [2]")


@pytest.mark.parametrize("kind", ["missing", "unexpected", "shape"])
def test_a_damaged_checkpoint_is_refused(kind: str, reference: Reference, tmp_path: Path) -> None:
    tensors = load_file(reference.path / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    if kind == "missing":
        del tensors[name]
    elif kind == "unexpected":
        tensors["model.layers.9.surprise"] = torch.zeros(2)
    else:
        tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((reference.path / "config.json").read_text())
    named = "surprise" if kind == "unexpected" else "k_proj"
    with pytest.raises(RanksFailed, match=f"McaError.*{named}"):
        run_ranks(1, difference, replace(reference, path=tmp_path), None)
