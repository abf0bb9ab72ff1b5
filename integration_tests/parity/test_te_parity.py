"""Transformer Engine's layers hold and compute what the local ones do, and what ``transformers`` computes.

Every family is built on one layout of the parity matrix, on all of them with `--cases all`.
"""

from pathlib import Path
from typing import Any

import pytest

from emulated_te import needs_te, run_emulated
from gradients import compute, expected_gradients, worst_errors
from layouts import Pair, arguments, by_layout, selected, spread, world_size
from lora_gradients import assert_equal_pefts, expected_of
from lora_gradients import gradients as adapter_gradients
from packed_rows import compare as compare_packed
from parity import TOLERANCE, is_sparse
from reference import FAMILY_CASES, Reference, make_reference

pytestmark = [pytest.mark.ranks, needs_te]

LOCAL = {"transformer_impl": "local"}
DENSE_LAYOUTS = ("tp2sp", "tp2pp2sp", "pp2vpp2", "tp2")
MOE_LAYOUTS = ("tp2ep2etp1sp", "pp2vpp2ep2", "tp2sp", "tp2ep2etp1", "ep2")
DENSE = [case for case in FAMILY_CASES if not is_sparse(case)]
MOE = [case for case in FAMILY_CASES if is_sparse(case)]
GRID = spread(DENSE, DENSE_LAYOUTS) + spread(MOE, MOE_LAYOUTS)


def anatomy(model: Any) -> dict[str, dict[str, Any]]:
    """What a model is made of on this rank, by canonical name: shape and marks; and what a checkpoint of it holds."""
    from megatron.core import parallel_state

    marks = (
        "tensor_model_parallel",
        "partition_dim",
        "sequence_parallel",
        "allreduce",
        "is_embedding_or_output_parameter",
    )
    defaults = {"allreduce": True, "partition_dim": -1}
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
    }
    sharded = [chunk.sharded_state_dict(metadata=metadata) for chunk in model.chunks]
    return {
        "shapes": {item.param.mca_name(): tuple(tensor.shape) for item, tensor in model.local_params()},
        "marks": {
            item.param.mca_name(): {name: getattr(tensor, name, defaults.get(name, False)) for name in marks}
            for item, tensor in model.local_params()
        },
        "sharded": {
            value.key: getattr(value, "global_shape", type(value).__name__)
            for state in sharded
            for value in state.values()
            if "_extra_state" not in value.key
        },
    }


def measure(references: list[Reference], layout: str, folder: Path) -> list[dict[str, Any]]:
    """Of every model: what its anatomy has otherwise than local layers, its classes and logits. Runs on every rank."""
    computed = compute(references, layout, folder)
    return [
        {"logits": logits, **compared(each, layout)}
        for each, logits in zip(references, computed, strict=True)
    ]


def compared(reference: Reference, layout: str) -> dict[str, Any]:
    from mca_config.errors import McaError
    from mca_models.megatron import AutoModel

    try:
        local = anatomy(AutoModel.from_pretrained(reference.path, arguments(layout, **LOCAL)))
    except McaError as error:
        return {"refused": str(error)}
    model = AutoModel.from_pretrained(reference.path, arguments(layout))
    different = {
        name: {
            key: (local[name].get(key), part.get(key))
            for key in local[name].keys() | part.keys()
            if local[name].get(key) != part.get(key)
        }
        for name, part in anatomy(model).items()
    }
    return {"different": different, "classes": {type(module).__name__ for module in model.modules()}}


def of_ranks(measured: "Measured", case: str, layout: str) -> list[dict[str, Any]]:
    """What the ranks found of one model, which local layers take too on this layout."""
    ranks = measured[1][case, layout]
    if "refused" in ranks[0]:
        pytest.skip(ranks[0]["refused"])
    return ranks


Measured = tuple[Path, dict[Pair, list[dict[str, Any]]]]
"""Where gradients lie, and what all ranks found."""


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder, ranks = tmp_path_factory.mktemp("engine"), {}
    chosen = selected(request, GRID)
    references = {case: make_reference(case, folder, batch=4) for case, _ in chosen}
    for reference in references.values():
        expected_gradients(reference, folder)
    for layout, cases in by_layout(chosen).items():
        models = [references[case] for case in cases]
        found = run_emulated(world_size(layout), measure, models, layout, folder, timeout=500)
        for number, case in enumerate(cases):
            ranks[case, layout] = [of_rank[number] for of_rank in found]
    return folder, ranks


@pytest.mark.parametrize("case,layout", GRID)
def test_names_shapes_marks_and_sharded_keys_are_those_of_local_layers(
    case: str, layout: str, measured: Measured
) -> None:
    for found in of_ranks(measured, case, layout):
        assert found["different"] == {"shapes": {}, "marks": {}, "sharded": {}}


@pytest.mark.parametrize("case,layout", GRID)
def test_logits_and_gradients_equal_transformers(case: str, layout: str, measured: Measured) -> None:
    folder, _ = measured
    found = [of_rank["logits"] for of_rank in of_ranks(measured, case, layout)]
    assert all(isinstance(difference, float) and difference <= TOLERANCE for difference in found), found
    worst = worst_errors(folder / f"{case}-expected", folder / f"{case}-{layout}")
    assert worst[0][1] <= TOLERANCE, worst


@pytest.mark.parametrize("case,layout", GRID)
def test_the_modules_are_transformer_engines(case: str, layout: str, measured: Measured) -> None:
    classes = set().union(*(of_rank["classes"] for of_rank in of_ranks(measured, case, layout)))
    assert "TERowParallelLinear" in classes
    assert is_sparse(case) == any(name.startswith("TE") and "Grouped" in name for name in classes)


PACKED = (("qwen3", "tp2sp"), ("mistral", "tp2"), ("deepseek_v3", "tp2sp"), ("gpt_oss", "ep2"))


@pytest.mark.parametrize("case,layout", PACKED)
def test_packed_equals_separate_and_transformers(case: str, layout: str, tmp_path: Path) -> None:
    for found in run_emulated(2, compare_packed, make_reference(case, tmp_path), layout):
        assert max(found) <= TOLERANCE


def test_fused_rotary_embeddings_equal_transformers(tmp_path: Path) -> None:
    for case in ("gemma3_text", "qwen3"):
        reference = make_reference(case, tmp_path)
        (found,) = run_emulated(1, compare_packed, reference, "tp1", apply_rope_fusion=True)
        assert max(found) <= TOLERANCE, case


ADAPTERS = (("qwen3", "tp2"), ("qwen3_moe", "tp2ep2etp1sp"), ("deepseek_v3", "tp2sp"), ("qwen3_next", "ep2"))


def test_gradients_of_adapters_equal_pefts(tmp_path: Path) -> None:
    expected = {case: expected_of(case, tmp_path) for case, _ in ADAPTERS}
    jobs = [(expected[case].base, expected[case].adapter, layout) for case, layout in ADAPTERS]
    for (case, _), found in zip(ADAPTERS, run_emulated(2, adapter_gradients, jobs)[0], strict=True):
        assert_equal_pefts(expected[case], found)
