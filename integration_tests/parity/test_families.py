"""Families with layers of their own: logits, gradients and packed sequences as ``transformers`` has them."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_hf import ALIKE
from tiny_versions import available

import reference
from checkpoint_files import round_trip, tensors_of
from gradients import Computed, compute_all, expected_gradients, export_gradient, worst_errors
from harness import run_ranks
from layouts import EVERY, arguments, selected, spread, tiered, world_size
from mca_convert.cli import main as convert
from packed_rows import compare_all
from parity import TOLERANCE, is_sparse
from reference import make_reference

pytestmark = pytest.mark.ranks

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
}
# a dict for each model: transformers writes into it
LINEAR_FULL = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
YARN_FULL = {
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "attention_factor": 1.5,
        "beta_fast": 2.0,
        "original_max_position_embeddings": 16,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3-short": ("phi3", {"rope_parameters": dict(LONGROPE), "original_max_position_embeddings": 32}),
    "phi3-long": ("phi3", {"rope_parameters": dict(LONGROPE), "original_max_position_embeddings": 16}),
    "phi3-partial": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "gemma3-two-ropes": (
        "gemma3_text",
        {"rope_parameters": LINEAR_FULL, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "olmo3-yarn": ("olmo3", {"rope_parameters": YARN_FULL}),
    "smollm3-windows": (
        "smollm3",
        {"no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "sliding_window": 6},
    ),
}
for case, (base, different) in MORE.items():
    reference.CASES[case] = (base, {**reference.CASES[base][1], **different})

MORE_MOE: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3-choice": (
        "deepseek_v3",
        {
            "n_routed_experts": 8,
            "topk_group": 1,
            "num_experts_per_tok": 3,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "attention_factor": 1.3,
                "mscale_all_dim": 0.7,
                "beta_fast": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
            },
        },
    ),
}
for case, (base, different) in MORE_MOE.items():
    reference.CASES[case] = (base, {**reference.CASES[base][1], **different})

DENSE = (
    "cwm",
    "granite",
    "gemma2",
    "olmo2",
    "olmo3",
    "exaone4",
    "exaone4-no-window",
    "glm4",
    "qwen3_5_text",
    "nemotron_h-dense",
    *MORE,
)
MOE = (
    "olmoe",
    "minimax_m2",
    "glm4_moe_lite",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v2-no-q-lora",
    "qwen3_next",
    "qwen3_5_moe_text",
    "nemotron_h",
    "nemotron_h-latent",
    *MORE_MOE,
)
# every one where the tensors that are its own are cut, and by default one on each of the others
DENSE_LAYOUTS = ("tp2cp2sp", "pp2vpp2", "tp1", "tp2", "tp2sp", "cp2")
MOE_LAYOUTS = ("tp2ep2etp1", "cp2ep2pp2", "tp1", "ep2", "cp2", "pp2vpp2ep2", "tp2etp2ep2")
# families of parts that others have too: by default each on one layout, another for each
ALIKE_DENSE = [case for case in ALIKE if not is_sparse(case)]
ALIKE_MOE = [case for case in ALIKE if is_sparse(case)]
UNCUT = ("gpt_oss",)  # experts with biases cannot be cut
# where context parallelism cuts what is a family's own: windows, states, ropes of several kinds
ALONG_THE_SEQUENCE = ("gemma2", "exaone4", "qwen3_5_text", "gemma3-two-ropes", "phi3-long", "smollm3-windows")
ALONG_THE_SEQUENCE += ("nemotron_h-dense",)
GRID = spread(DENSE if EVERY else ALONG_THE_SEQUENCE, DENSE_LAYOUTS[:1]) + spread(MOE, MOE_LAYOUTS[:1])
GRID += [] if EVERY else [(case, "tp2sp") for case in DENSE if case not in ALONG_THE_SEQUENCE]
OTHERS = ("qwen3_5_text", "gemma3-two-ropes", "olmo2", "exaone4")
MOE_OTHERS = ("deepseek_v2", "gpt_oss", "deepseek_v3-choice", "minimax_m2", "qwen3_next", "glm4_moe_lite")
GRID += spread(DENSE if EVERY else OTHERS, DENSE_LAYOUTS[1:])
GRID += spread(MOE if EVERY else MOE_OTHERS, MOE_LAYOUTS[1:])
GRID += [] if EVERY else [("gemma4_text-e2b", "tp2")]  # a table of each layer's own, summed over tensor ranks
OF_SHARED_GROUPS = ("bamba", "tp4")  # two tensor ranks for each group of heads with states
RESEMBLING = ("deepseek_v2-no-q-lora", "exaone4", "glm4_moe_lite", "minimax_m2", "olmoe", "phi3-long")
# of parts that are another's, under names of their own
RENAMED = (
    *("cwm", "exaone4-no-window", "glm4", "granite", "olmo3-yarn", "phi3-short"),
    *(
        "dots1",
        "ernie4_5",
        "exaone_moe",
        "falcon-one-norm",
        "flex_olmo",
        "gemma",
        "gemma4_unified_text",
        "glm",
    ),
    *(
        "glm_moe_dsa",
        "gpt_neox-sequential",
        "gptj",
        "granitemoe",
        "granitemoe_swa",
        "granitemoeshared",
        "helium",
    ),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "hyperclovax", "internlm3", "iquestcoder", "jais2", "kimi_k2"),
    *("mellum", "mimo", "ministral", "phi", "solar_open", "stablelm", "starcoder2", "vaultgemma", "youtu"),
)
ALIKE_GRID = spread(ALIKE_DENSE, DENSE_LAYOUTS) + spread(ALIKE_MOE, MOE_LAYOUTS)
# by default on two ranks, on which they cost a third
WIDE = [] if EVERY else [(case, layout) for case, layout in ALIKE_GRID if world_size(layout) > 2]
GRID += ALIKE_GRID + [(case, "tp2ep2etp1" if is_sparse(case) else "tp2sp") for case, _ in WIDE]
# and of those on four ranks the ones whose parts another one has
WIDE += [] if EVERY else [pair for pair in GRID if pair[0] in RESEMBLING and world_size(pair[1]) > 2]
WIDE += [OF_SHARED_GROUPS]
WIDE += [] if EVERY else [pair for pair in GRID if pair[0] in RENAMED and pair not in WIDE]
GRID = [
    (case, layout) for case, layout in [*GRID, OF_SHARED_GROUPS] if not (case in UNCUT and "etp2" in layout)
]


@pytest.fixture(scope="module")
def computed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Computed:
    return compute_all(selected(request, GRID), tmp_path_factory.mktemp("computed"))


@pytest.mark.cases(2)
@pytest.mark.parametrize("case,layout", tiered(GRID, *WIDE))
def test_logits_and_gradients_equal_transformers(case: str, layout: str, computed: Computed) -> None:
    computed.check(case, layout)


PACKED = ("gpt_oss", "gemma3-two-ropes", "olmo2", "qwen3_5_text", "nemotron_h-dense")
# what the later families brought: chosen keys, chunks, heads by layer, queries that grow, ropes for some layers,
# learned positions, channels that fade by themselves; by default on one rank
PACKED_ALIKE = (
    *("deepseek_v32", "gemma4_text", "gpt2", "granite_swa", "kimi_linear", "llama4_text", "mimo_v2_flash"),
    *("gemma4_text-e2b", "longcat_flash", "minimax_m3_vl_text", "ministral3", "olmo_hybrid"),
)


@pytest.mark.cases(2)
@pytest.mark.parametrize("layout", ["tp1", "cp2", "tp2cp2sp"])
def test_packed_equals_separate(layout: str, tmp_path: Path) -> None:
    of_layout = (*PACKED, *(PACKED_ALIKE if EVERY or layout == "tp1" else ()))
    cases = [case for case in of_layout if layout == "tp1" or (case in UNCUT) == (layout == "cp2")]
    if layout == "tp2cp2sp" and not EVERY:
        cases.remove("olmo2")
    references = [make_reference(case, tmp_path) for case in available(cases)]
    for of_rank in run_ranks(world_size(layout), compare_all, references, [layout]):
        for pair, found in of_rank.items():
            assert max(found) <= TOLERANCE, pair


SAVED = [
    ("qwen3_next", "tp2ep2etp1"),
    ("qwen3_5_text", "tp2pp2vpp2"),
    ("granitemoehybrid-dense", "tp2"),
    ("phi3-long", "tp2"),
    ("gpt_oss", "ep2"),
    ("gemma4_text-e2b", "tp2"),
]
if EVERY:
    SAVED += [("gemma3-two-ropes", "tp2pp2"), ("olmo2", "tp2"), ("deepseek_v2", "ep2")]


@pytest.mark.cases(0, always=["qwen3_next-tp2ep2etp1", "qwen3_5_text-tp2pp2vpp2", "gemma4_text-e2b-tp2"])
@pytest.mark.parametrize("case,layout", SAVED)
def test_saved_checkpoints_are_those_of_the_converter(case: str, layout: str, tmp_path: Path) -> None:
    source = make_reference(case, tmp_path, "bfloat16").path
    run_ranks(world_size(layout), round_trip, [(source, layout)], tmp_path)
    assert tensors_of(tmp_path / f"{source.name}-{layout}-hf") == tensors_of(source)
    sizes, converted = arguments(layout).layout(), tmp_path / "converted"
    flags = [f"--{name}={size}" for name, size in asdict(sizes).items() if type(size) is int]
    assert convert([f"--checkpoint_path={source}", f"--output_path={converted}", *flags]) == 0
    assert tensors_of(converted) == tensors_of(tmp_path / f"{source.name}-{layout}-mca")


AGAIN: dict[str, dict[str, Any]] = {
    "uniform": {"recompute_method": "uniform", "recompute_num_layers": 1},
    "pairs": {"recompute_method": "uniform", "recompute_num_layers": 2},
    "block": {"recompute_method": "block", "recompute_num_layers": 2},
}


def recomputed_gradients(each: reference.Reference, folder: Path) -> None:
    """The gradients under every kind of full recomputation. Runs on a rank."""
    for name, settings in AGAIN.items():
        full = {"recompute_granularity": "full", **settings}
        export_gradient(each, "tp1", folder / f"{each.case}-{name}", **full)


def test_what_layers_hand_on_comes_back_through_recomputation(tmp_path: Path) -> None:
    each = make_reference("gemma4_text-e2b", tmp_path, batch=4)
    expected = expected_gradients(each, tmp_path)
    run_ranks(1, recomputed_gradients, each, tmp_path)
    for name in AGAIN:
        worst = worst_errors(expected, tmp_path / f"{each.case}-{name}")
        assert worst[0][1] <= TOLERANCE, (name, worst)


@pytest.mark.qualify
def test_references_are_not_trivial(tmp_path: Path) -> None:
    for case in available((*DENSE, *MOE, *(ALIKE if EVERY else ()))):
        assert float(make_reference(case, tmp_path).logits.std()) > 0.5, case


def sharded_names(references: list[reference.Reference], layout: str) -> list[dict[str, Any]]:
    """What Megatron's distributed checkpoint would hold of each model. Runs on every rank."""
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
    """What the norms of each model are called in a distributed checkpoint, and in its template. Runs on a rank."""
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
    """The names in the prediction layer of a GLM whose decoder layers are ``kinds``."""
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
