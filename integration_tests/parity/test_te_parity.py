"""Transformer Engine's layers have the parameters of the local ones, and compute what ``transformers`` computes.

`--cases all` tests every family on every layout.
"""

from pathlib import Path
from typing import Any

import pytest

from case_tables import TE_LAYERS
from cases import Case, as_params, group_by_layout, needed, skip_unsupported
from emulated_te import needs_te, run_emulated
from gradients import compute, expected_gradients, worst_errors
from layouts import arguments
from lora_gradients import assert_equal_pefts, expected_of
from lora_gradients import gradients as adapter_gradients
from packed_rows import compare as compare_packed
from parity import TOLERANCE, is_sparse
from reference import Reference, make_reference

pytestmark = [pytest.mark.ranks, needs_te]

LOCAL = {"transformer_impl": "local"}


def anatomy(model: Any) -> dict[str, dict[str, Any]]:
    """Return shape and marks of a model's parameters on this rank, by canonical name, and those in its checkpoint."""
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
    """Return each model's differences from local layers, its classes and logits. Runs on every rank."""
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


Measured = tuple[Path, dict[Case, list[dict[str, Any]]]]
"""Directory of the gradients, and the results of all ranks."""


@pytest.fixture
def by_rank(case: Case, measured: Measured, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Return the results of the ranks for one model, which local layers support too on this layout."""
    ranks = measured[1][case]
    if "refused" in ranks[0]:
        skip_unsupported(request, ranks[0]["refused"])
    return ranks


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder, ranks, cases = tmp_path_factory.mktemp("engine"), {}, needed(request)
    references = {model: make_reference(model, folder, batch=4) for model in {case.model for case in cases}}
    for reference in references.values():
        expected_gradients(reference, folder)
    for layout, group in group_by_layout(cases).items():
        models = [references[case.model] for case in group]
        found = run_emulated(group[0].num_ranks, measure, models, layout, folder, timeout=500)
        ranks |= {case: [rank[number] for rank in found] for number, case in enumerate(group)}
    return folder, ranks


# an axis each, of dense models and of experts; what they make otherwise than local layers
DEFAULT = pytest.mark.cases(
    8,
    always=[
        *("qwen3-tp2sp", "gemma2-tp2pp2sp", "llama-pp2vpp2", "qwen3_5_text-tp2"),
        *("deepseek_v3-tp2ep2etp1sp", "qwen3_moe-pp2vpp2ep2", "qwen3_next-tp2ep2etp1", "gpt_oss-ep2"),
    ],
)


@DEFAULT
@pytest.mark.parametrize("case", as_params(TE_LAYERS))
def test_names_shapes_marks_and_sharded_keys_are_those_of_local_layers(
    case: Case, by_rank: list[dict[str, Any]]
) -> None:
    for found in by_rank:
        assert found["different"] == {"shapes": {}, "marks": {}, "sharded": {}}


@DEFAULT
@pytest.mark.parametrize("case", as_params(TE_LAYERS))
def test_logits_and_gradients_equal_transformers(
    case: Case, measured: Measured, by_rank: list[dict[str, Any]]
) -> None:
    folder, _ = measured
    found = [of_rank["logits"] for of_rank in by_rank]
    assert all(isinstance(difference, float) and difference <= TOLERANCE for difference in found), found
    worst = worst_errors(folder / f"{case.model}-expected", folder / case.id)
    assert worst[0][1] <= TOLERANCE, worst


@DEFAULT
@pytest.mark.parametrize("case", as_params(TE_LAYERS))
def test_the_modules_are_transformer_engines(case: Case, by_rank: list[dict[str, Any]]) -> None:
    classes = set().union(*(of_rank["classes"] for of_rank in by_rank))
    assert "TERowParallelLinear" in classes
    assert is_sparse(case.model) == any(name.startswith("TE") and "Grouped" in name for name in classes)


PACKED = (
    Case("qwen3", "tp2sp"),
    Case("mistral", "tp2"),
    Case("deepseek_v3", "tp2sp"),
    Case("gpt_oss", "ep2"),
)


@pytest.mark.parametrize("case", as_params(PACKED))
def test_packed_equals_separate_and_transformers(case: Case, tmp_path: Path) -> None:
    for found in run_emulated(2, compare_packed, make_reference(case.model, tmp_path), case.layout):
        assert max(found) <= TOLERANCE


def test_fused_rotary_embeddings_equal_transformers(tmp_path: Path) -> None:
    for case in ("gemma3_text", "qwen3"):
        reference = make_reference(case, tmp_path)
        (found,) = run_emulated(1, compare_packed, reference, "tp1", apply_rope_fusion=True)
        assert max(found) <= TOLERANCE, case


ADAPTERS = (
    *(Case("qwen3", "tp2"), Case("qwen3_moe", "tp2ep2etp1sp")),
    *(Case("deepseek_v3", "tp2sp"), Case("qwen3_next", "ep2")),
)


def test_gradients_of_adapters_equal_pefts(tmp_path: Path) -> None:
    expected = [expected_of(case.model, tmp_path) for case in ADAPTERS]
    jobs = [(each.base, each.adapter, case.layout) for each, case in zip(expected, ADAPTERS, strict=True)]
    for each, found in zip(expected, run_emulated(2, adapter_gradients, jobs)[0], strict=True):
        assert_equal_pefts(each, found)
