"""Families with special layers: logits, gradients and packed sequences equal those of ``transformers``."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_versions import available

import reference
from case_tables import FAMILY_GRADIENTS, PACKED_FAMILIES
from cases import Case, as_params, group_for_forks, needed
from checkpoint_files import round_trip, tensors_of
from gradients import Computed, compute_all, expected_gradients, export_gradient, worst_errors
from harness import run_ranks
from layouts import arguments
from mca_convert.cli import main as convert
from packed_rows import compare_on_ranks
from parity import TOLERANCE
from reference import make_reference

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def computed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Computed:
    return compute_all(needed(request), tmp_path_factory.mktemp("computed"))


@pytest.mark.cases(
    0,
    always=[
        # each axis, with layers that it cuts otherwise than those of other families
        *("qwen3_next-tp2ep2etp1", "gpt_oss-tp2ep2etp1", "nemotron_h-tp2ep2etp1", "kimi_linear-tp2ep2etp1"),
        *("deepseek_v32-tp2ep2etp1", "minimax_m3_vl_text-tp2ep2etp1", "llama4_text-ep2", "cohere2-tp2"),
        *("falcon_h1-norm-tp2sp", "granite_swa-tp2sp", "qwen3_5_text-cp2", "minicpm3-pp2vpp2"),
        *("deepseek_v2-cp2ep2pp2", "granitemoehybrid-tp1", "lfm2-cp2", "gemma4_text-experts-ep2"),
        *("bailing_hybrid-tp2ep2etp1", "jamba-tp2ep2etp1", "minimax-tp2ep2etp1"),
    ],
)
@pytest.mark.parametrize("case", as_params(FAMILY_GRADIENTS))
def test_logits_and_gradients_equal_transformers(case: Case, computed: Computed) -> None:
    computed.check(case)


@pytest.fixture(scope="module")
def packed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Case, tuple[float, float, float]]:
    """The largest differences of packed rows, over all ranks."""
    return compare_on_ranks(needed(request), tmp_path_factory.mktemp("packed"))


@pytest.mark.cases(
    0,
    always=[
        # states, windows and sinks: what packing and context parallelism cut together
        *("gpt_oss-cp2", "qwen3_5_text-tp2cp2sp", "gemma3-two-ropes-tp1", "nemotron_h-dense-tp1"),
        *("kimi_linear-tp1", "llama4_text-tp1", "minimax_m3_vl_text-tp1", "olmo_hybrid-tp1"),
    ],
)
@pytest.mark.parametrize("case", as_params(PACKED_FAMILIES))
def test_packed_equals_separate(case: Case, packed: dict[Case, tuple[float, float, float]]) -> None:
    assert max(packed[case]) <= TOLERANCE


SAVED = (
    *(Case("qwen3_next", "tp2ep2etp1"), Case("qwen3_5_text", "tp2pp2vpp2"), Case("gpt_oss", "ep2")),
    *(Case("granitemoehybrid-dense", "tp2"), Case("phi3-long", "tp2"), Case("gemma4_text-e2b", "tp2")),
    *(Case("gemma3-two-ropes", "tp2pp2"), Case("olmo2", "tp2"), Case("deepseek_v2", "ep2")),
)


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with each model as it was, and as it was loaded and saved."""
    folder = tmp_path_factory.mktemp("saved")
    for group in group_for_forks(needed(request)):
        jobs = [(make_reference(case.model, folder, "bfloat16").path, case.layout) for case in group]
        run_ranks(group[0].num_ranks, round_trip, jobs, folder)
    return folder


@pytest.mark.cases(0, always=["qwen3_next-tp2ep2etp1", "qwen3_5_text-tp2pp2vpp2", "gemma4_text-e2b-tp2"])
@pytest.mark.parametrize("case", as_params(SAVED))
def test_saved_checkpoints_are_those_of_the_converter(case: Case, saved: Path, tmp_path: Path) -> None:
    source = saved / f"{case.model}-bfloat16"
    assert tensors_of(saved / f"{source.name}-{case.layout}-hf") == tensors_of(source)
    sizes, converted = arguments(case.layout).layout(), tmp_path / "converted"
    flags = [f"--{name}={size}" for name, size in asdict(sizes).items() if type(size) is int]
    assert convert([f"--checkpoint_path={source}", f"--output_path={converted}", *flags]) == 0
    assert tensors_of(converted) == tensors_of(saved / f"{source.name}-{case.layout}-mca")


AGAIN: dict[str, dict[str, Any]] = {
    "uniform": {"recompute_method": "uniform", "recompute_num_layers": 1},
    "pairs": {"recompute_method": "uniform", "recompute_num_layers": 2},
    "block": {"recompute_method": "block", "recompute_num_layers": 2},
}


def recomputed_gradients(each: reference.Reference, folder: Path) -> None:
    """The gradients under every kind of full recomputation. Runs on a rank."""
    for name, settings in AGAIN.items():
        full = {"recompute_granularity": "full", **settings}
        export_gradient(each, "tp1", folder / f"{each.model}-{name}", **full)


def test_what_layers_hand_on_comes_back_through_recomputation(tmp_path: Path) -> None:
    each = make_reference("gemma4_text-e2b", tmp_path, batch=4)
    expected = expected_gradients(each, tmp_path)
    run_ranks(1, recomputed_gradients, each, tmp_path)
    for name in AGAIN:
        worst = worst_errors(expected, tmp_path / f"{each.model}-{name}")
        assert worst[0][1] <= TOLERANCE, (name, worst)


@pytest.mark.qualify
def test_references_are_not_trivial(tmp_path: Path) -> None:
    for model in available({case.model: None for case in FAMILY_GRADIENTS}):
        assert float(make_reference(model, tmp_path).logits.std()) > 0.5, model


def sharded_names(references: list[reference.Reference], layout: str) -> list[dict[str, Any]]:
    """Return the names in Megatron's distributed checkpoint of each model. Runs on every rank."""
    from megatron.core import parallel_state

    from mca_models.megatron import AutoModel

    group = parallel_state.get_data_parallel_group
    found = []
    for each in references:
        model = AutoModel.from_pretrained(each.path, arguments(layout))
        metadata = {"dp_cp_group": group(with_context_parallel=True), "singleton_local_shards": False}
        state = model.chunks[0].sharded_state_dict(metadata=metadata)
        found.append({name: getattr(value, "global_shape", None) for name, value in state.items()})
    return found


def test_distributed_checkpoints_cut_what_is_cut(tmp_path: Path) -> None:
    references = [make_reference(case, tmp_path) for case in ("olmo2", "qwen3_5_text")]
    for olmo, qwen in run_ranks(2, sharded_names, references, "tp2"):
        assert olmo["decoder.layers.0.self_attention.q_layernorm.weight"] == (4, 32)  # all layers, all heads
        assert olmo["decoder.layers.0.mlp.post_layernorm.weight"] == (4, 32)
        assert qwen["decoder.layers.0.self_attention.A_log"] == (4,)  # layers differ: each on its own
        assert qwen["decoder.layers.0.self_attention.out_norm.weight"] == (10,)


def norm_keys(cases: list[str]) -> list[tuple[set[str], set[str]]]:
    """Return the names of each model's norms in a distributed checkpoint and in its template. Runs on a rank."""
    from megatron.core import parallel_state

    from mca_models.megatron import AutoModel
    from mca_models.templates import config_from_hf

    def norms(names: Any) -> set[str]:
        return {re.sub(r"layers\.\d+\.", "layers.", name) for name in names if re.search("layer_?norm", name)}

    found = []
    for case in cases:
        kind, different = reference.CASES[case]
        different = different | (
            {"num_nextn_predict_layers": 1} if kind in ("glm4_moe", "deepseek_v3") else {}
        )
        config = transformers.AutoConfig.for_model(kind, **{**reference.SIZE, **different})
        model = AutoModel.from_config(config_from_hf(config.to_dict()), arguments("tp1"))
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        state = model.chunks[0].sharded_state_dict(metadata={"dp_cp_group": group})
        canonical = (name for name, _ in model.canonical_parameters())
        found.append((norms(value.key for value in state.values()), norms(canonical)))
    return found


def test_norms_have_one_name_in_distributed_checkpoints() -> None:
    """Transformer Engine's, so that its layers and the local ones load what the other kind wrote."""
    cases = [
        "qwen3",
        "qwen3_moe",
        "glm4_moe",
        "deepseek_v3",
        "deepseek_v2-no-q-lora",
        "qwen3_next",
        "gpt_oss",
    ]
    for case, (keys, names) in zip(cases, run_ranks(1, norm_keys, cases)[0], strict=True):
        assert {key for key in keys if "_extra_state" not in key} == names, case


def prediction_layer(kinds: list[str]) -> list[str]:
    """The names in the MTP layer of a GLM whose decoder layers are ``kinds``."""
    from mca_models.megatron import AutoModel
    from mca_models.templates import config_from_hf

    kind, different = reference.CASES["glm4_moe_lite"]
    sizes = {**reference.SIZE, **different, "num_hidden_layers": len(kinds), "mlp_layer_types": kinds}
    described = transformers.AutoConfig.for_model(kind, **sizes).to_dict() | {"num_nextn_predict_layers": 1}
    model = AutoModel.from_config(config_from_hf(described), arguments("tp1"))
    return [name for name, _ in model.canonical_parameters() if name.startswith("mtp.")]


def test_prediction_layers_have_experts_after_a_dense_layer() -> None:
    ((after_dense, after_sparse),) = run_ranks(1, both_prediction_layers)
    assert any("experts" in name for name in after_dense)
    assert after_dense == after_sparse


def both_prediction_layers() -> tuple[list[str], list[str]]:
    return prediction_layer(["sparse", "dense"]), prediction_layer(["dense", "sparse"])
